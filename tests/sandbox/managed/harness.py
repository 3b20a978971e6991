"""A managed sandbox and the replica of its provider, joined by the provider's own SDK."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.sandbox.managed.replica import Replica

from penstock.sandbox import SandboxConfig
from penstock.sandbox.managed.sandbox import ManagedSandbox


@dataclass(frozen=True, slots=True)
class Managed:
    sandbox: ManagedSandbox
    replica: Replica
    config: SandboxConfig


REPLICAS = {
    "daytona": "DaytonaReplica",
    "e2b": "E2BReplica",
    "kubernetes": "KubernetesReplica",
    "modal": "ModalReplica",
}
MANAGED = frozenset(REPLICAS)


@contextlib.asynccontextmanager
async def replica_of(backend: str, config: SandboxConfig) -> AsyncIterator[tuple[Replica, SandboxConfig]]:
    """The replica answers where this process's environment says, until the end; `config` is made fit for it."""
    module = importlib.import_module(f"tests.sandbox.managed.{backend}_replica")
    replica: Replica = getattr(module, REPLICAS[backend])()
    image = "base" if backend == "e2b" else "python:3.12-slim"
    async with replica.serving() as url:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, module.environment(url, Path(folder))),
        ):
            try:
                yield replica, config.model_copy(update={"backend": backend, "image": image})
            finally:
                replica.close()


@contextlib.asynccontextmanager
async def managed_sandbox(backend: str, config: SandboxConfig, owner: str = "tests") -> AsyncIterator[Managed]:
    async with replica_of(backend, config) as (replica, fitted):
        sandbox = ManagedSandbox(fitted, owner)
        try:
            yield Managed(sandbox, replica, fitted)
        finally:
            await sandbox.close()
