"""Real boxes, and the proof that none of them leaves anything behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.sandbox.bwrap import UID_BASE, BwrapSandbox
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.docker.sandbox import DockerSandbox
from penstock.sandbox.protocol import SandboxError
from penstock.sandbox.session import DriverSession

OWNER = f"tests-{os.getpid()}"
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=5.0)
DOCKER = CONFIG.model_copy(update={"backend": "docker", "image": "penstock-box:base"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {"bwrap": None if shutil.which("bwrap") else "bubblewrap is not installed"}
    if any(item.get_closest_marker("docker") for item in items):
        missing["docker"] = why_no_docker()
    for item in items:
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


def box_processes(pid: int) -> list[str]:
    """Living processes (no zombies: pid 1 may reap late) with a uid that boxes of the worker `pid` get."""
    first = UID_BASE + pid % 16384 * 1024
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
        except OSError:
            continue
        if first <= int(status["Uid"].split()[0]) < first + 1024 and status["State"][0] not in "ZX":
            found.append(f"{folder.name} {status['Name']}")
    return found


def box_cgroups(owner: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/penstock/{owner}/*") if path.is_dir()]


def _left_behind() -> list[str]:
    folders = list(Path(tempfile.gettempdir()).glob("penstock-unsafe-*")) + box_cgroups(OWNER)
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "/newroot" in line]
    return [*map(str, folders), *box_processes(os.getpid()), *mounts]


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(_left_behind())
    yield
    deadline = time.monotonic() + 5.0
    while (left := set(_left_behind()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[BwrapSandbox]:
    made = BwrapSandbox(CONFIG, OWNER)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def session(sandbox: BwrapSandbox) -> DriverSession:
    return await sandbox.start("a test")
