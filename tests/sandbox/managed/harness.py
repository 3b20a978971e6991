"""A managed sandbox and the replica of its provider, joined by the provider's own SDK."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.sandbox.managed.replica import Replica

from penstock.sandbox import SandboxConfig
from penstock.sandbox.managed.sandbox import ManagedSandbox


@dataclass(frozen=True, slots=True)
class Provider:
    make_replica: Callable[[], Replica]
    environment: Callable[[str, Path], Mapping[str, str]]
    """Of the URL where the replica answers, and a folder for files: what the SDK reads."""
    image: str


@dataclass(frozen=True, slots=True)
class Managed:
    sandbox: ManagedSandbox
    replica: Replica
    config: SandboxConfig


def _e2b() -> Provider:
    from tests.sandbox.managed import e2b_replica as e2b

    return Provider(e2b.E2BReplica, e2b.environment, "base")


def _daytona() -> Provider:
    from tests.sandbox.managed import daytona_replica as daytona

    return Provider(daytona.DaytonaReplica, daytona.environment, "python:3.12-slim")


def _kubernetes() -> Provider:
    from tests.sandbox.managed import kubernetes_replica as kubernetes

    return Provider(kubernetes.KubernetesReplica, kubernetes.environment, "python:3.12-slim")


def _modal() -> Provider:
    from tests.sandbox.managed import modal_replica as modal

    return Provider(modal.ModalReplica, modal.environment, "python:3.12-slim")


PROVIDERS: Mapping[str, Callable[[], Provider]] = {
    **{"daytona": _daytona, "e2b": _e2b, "kubernetes": _kubernetes, "modal": _modal},
}
MANAGED = frozenset(PROVIDERS)


@contextlib.asynccontextmanager
async def replica_of(backend: str, config: SandboxConfig) -> AsyncIterator[tuple[Replica, SandboxConfig]]:
    """The replica answers where this process's environment says, until the end; `config` is made fit for it."""
    provider = PROVIDERS[backend]()
    replica = provider.make_replica()
    try:
        async with replica.serving() as url:
            with tempfile.TemporaryDirectory() as folder, _environment(provider.environment(url, Path(folder))):
                try:
                    yield replica, config.model_copy(update={"backend": backend, "image": provider.image})
                finally:
                    replica.close()
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


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with mock.patch.dict(os.environ, variables):
        yield
