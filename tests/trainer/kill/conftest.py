"""A redis-server, a nursery and an uninterrupted run for the folder's tests; helpers and gaps are importable."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "transfer_queue")]

torch = pytest.importorskip("torch")

from kill_stage import PASSWORD, KilledRun, Nursery

from penstock.transfer_queue import RedisServer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nursery() -> AsyncIterator[Nursery]:
    async with Nursery() as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, redis_server: RedisServer, nursery: Nursery
) -> dict[str, Any]:
    """The final weights of a run that nobody killed."""
    run = KilledRun(tmp_path_factory.mktemp("whole"), tiny_model, redis_server, "whole")
    assert await run.play(nursery, [], seed=0) == []
    return await run.check()


@pytest.fixture
def make(tmp_path: Path, tiny_model: str, redis_server: RedisServer) -> Callable[[str], KilledRun]:
    """Makes a run with a folder of its own."""

    def made(name: str) -> KilledRun:
        folder = tmp_path / name
        folder.mkdir()
        return KilledRun(folder, tiny_model, redis_server, f"{tmp_path.name}-{name}")

    return made
