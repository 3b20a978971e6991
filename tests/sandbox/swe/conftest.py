"""Tasks on a real repository, in real boxes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.sandbox.conftest import MAKERS, Maker
from tests.sandbox.containers import IMAGE
from tests.sandbox.swe.wordkit import make_repository, rows_of

from penstock.datasets.swe import write_box_packages
from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox
from penstock.sandbox.swe import SweLimits, SweTask

OWNER = f"tests-swe-{os.getpid()}"
CONFIG = SandboxConfig(max_boxes=4, memory_mb=512, tmp_mb=128, run_timeout_s=20.0, pids=128)
LIMITS = SweLimits(command_timeout_s=60.0, test_timeout_s=5.0, tests_timeout_s=60.0)


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("swe")
    base = make_repository(folder / "wordkit")
    return rows_of(folder / "wordkit", base, write_box_packages(folder / "packages"))


@pytest.fixture(scope="session")
def tasks(rows) -> dict[str, SweTask]:
    return {row["instance_id"]: SweTask.from_row(row) for row in rows}


@pytest.fixture
def task(tasks) -> SweTask:
    return tasks["wordkit-1"]


@pytest.fixture(scope="session")
def repository(rows) -> Path:
    return Path(rows[0]["repository"])


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with sandbox_with("bwrap") as made:
        yield made


@pytest_asyncio.fixture(
    params=[pytest.param("bwrap", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]
)
async def any_sandbox(request) -> AsyncIterator[Sandbox]:
    async with sandbox_with(request.param) as made:
        yield made


@pytest_asyncio.fixture
async def docker_sandbox() -> AsyncIterator[Sandbox]:
    async with sandbox_with("docker") as made:
        yield made


@contextlib.asynccontextmanager
async def sandbox_with(backend: str, **settings: Any) -> AsyncIterator[Sandbox]:
    MAKERS.append(Maker(os.getpid(), OWNER))
    sandbox = make_sandbox(CONFIG.model_copy(update={"backend": backend, "image": IMAGE, **settings}), OWNER)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def two_by_default(names: Iterable[str]) -> list[Any]:
    """As parameters: each costs a grading or more in fresh boxes, so the others are left to the deep run."""
    return [pytest.param(name, marks=[pytest.mark.deep] if number > 1 else []) for number, name in enumerate(names)]
