"""Real boxes, and the proof that none of them leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.sandbox import orphans
from tests.sandbox.backends import is_deep
from tests.sandbox.orphans import MAKERS, Maker

from penstock.sandbox import SandboxConfig, SandboxError
from penstock.sandbox.bwrap.sandbox import BwrapSandbox
from penstock.sandbox.docker.sandbox import DockerSandbox
from penstock.sandbox.session import DriverSession

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for benchmarks.support, which can start a sandbox server
OWNER = f"tests-{os.getpid()}"
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=60.0)
DOCKER = CONFIG.model_copy(update={"backend": "docker", "image": "penstock-box:base"})
MAKERS.append(Maker(os.getpid(), OWNER))


def box_processes(pid: int) -> list[str]:
    """Living processes, as "pid name", of the boxes that the worker `pid` made."""
    return orphans.box_processes([Maker(pid, "nobody")])


def box_cgroups(owner: str) -> list[str]:
    return orphans.cgroups([Maker(0, owner)])


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_deep(item):
            item.add_marker(pytest.mark.deep)
    skip_missing_backends(items)


def skip_missing_backends(items: list[pytest.Item], folder: Path | None = None) -> None:
    """Of `items`, those below `folder` (None: all) that are marked with a backend which is not here."""
    here = [item for item in items if folder is None or folder in item.path.parents]
    missing = {"bwrap": None if shutil.which("bwrap") else "bubblewrap is not installed"}
    if any(item.get_closest_marker("docker") for item in here):
        missing["docker"] = why_no_docker()
    for item in here:
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_no_docker() -> str | None:
    """What is missing for tests with containers; None where nothing is."""
    try:
        DockerSandbox(DOCKER, OWNER)
    except SandboxError as error:
        return f"{error} (scripts/setup-docker)"
    return None


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """The first fixture to start and the last to end: after every box, server and planted host."""
    before = orphans.left_behind(MAKERS)
    yield
    assert not orphans.wait_until_nothing_new(MAKERS, before)


DOOMED = """
import asyncio, sys
from penstock.sandbox import BoxNeeds, SandboxConfig, make_sandbox
async def main():
    config = SandboxConfig.model_validate_json(sys.argv[2])
    sandbox = make_sandbox(config, sys.argv[1])
    session = await sandbox.start("doomed", needs=BoxNeeds(own_root=config.own_root))
    await session.run(["sh", "-c", "setsid sleep 1000 &"])
    if config.own_root:
        await sandbox.snapshot(session)
    print("running", flush=True)
    await session.run_python("while True: pass", timeout_s=600)
asyncio.run(main())
"""


async def doomed_worker(owner: str, config: SandboxConfig) -> asyncio.subprocess.Process:
    """A process whose box runs until it is killed; with `own_root` the box was copied before."""
    command = [sys.executable, "-c", DOOMED, owner, config.model_dump_json()]
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), 200) == b"running\n"
    return worker


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[BwrapSandbox]:
    made = BwrapSandbox(CONFIG, OWNER)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def session(sandbox: BwrapSandbox) -> DriverSession:
    return await sandbox.start("a test")


@contextlib.asynccontextmanager
async def opened(owner: str = OWNER, **settings: Any) -> AsyncIterator[DockerSandbox]:
    """A docker sandbox of `owner`; `settings` are in place of those of `DOCKER`."""
    sandbox = DockerSandbox(DOCKER.model_copy(update=settings), owner)
    try:
        yield sandbox
    finally:
        await sandbox.close()
