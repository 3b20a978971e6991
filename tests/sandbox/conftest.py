"""Real boxes, and the proof that none of them leaves anything behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.sandbox.bwrap import BwrapSandbox
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.session import DriverSession

for folder in ("", "attacks"):  # what their tests share
    sys.path.insert(0, str(Path(__file__).parent / folder))

import leftovers
from leftovers import MAKERS, Maker

OWNER = f"tests-{os.getpid()}"
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=5.0)
MAKERS.append(Maker(os.getpid(), OWNER))


def box_processes(pid: int) -> list[str]:
    """Living processes, as "pid name", of the boxes that the worker `pid` made."""
    return leftovers.box_processes([Maker(pid, "nobody")])


def box_cgroups(owner: str) -> list[str]:
    return leftovers.cgroups([Maker(0, owner)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("bwrap"):
        return
    for item in items:
        if item.get_closest_marker("bwrap"):
            item.add_marker(pytest.mark.skip(reason="bubblewrap is not installed"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """The first fixture to start and the last to end: after every box, server and planted host."""
    before = leftovers.left_behind(MAKERS)
    yield
    assert not leftovers.wait_until_nothing_new(MAKERS, before)


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[BwrapSandbox]:
    made = BwrapSandbox(CONFIG, OWNER)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def session(sandbox: BwrapSandbox) -> DriverSession:
    return await sandbox.start("a test")
