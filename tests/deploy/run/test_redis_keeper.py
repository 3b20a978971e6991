"""The redis-server of a run is kept alive; where that fails, the run ends and says so."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.living import living_below
from tests.until import until

from penstock.common import Backoff
from penstock.deploy import RoleSpec, RunConfig, RunDir
from penstock.deploy.run.connection import RedisLost, keep_alive
from penstock.deploy.run.launcher import launch
from penstock.deploy.run.plan import Role
from penstock.deploy.run.supervisor import LocalPlacement
from penstock.trainer import DataConfig
from penstock.transfer_queue import QueueError, RedisServer, TransferQueueConfig

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.run.connection._START_BACKOFF", Backoff(0.01))


def break_restarts(monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
    """The next attempts to start redis-server again fail, as where its port has been taken."""
    restart, left = RedisServer.restart, attempts

    async def broken(server: RedisServer) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise QueueError("port 6379 for redis-server is in use")
        await restart(server)

    monkeypatch.setattr(RedisServer, "restart", broken)


async def test_keep_alive_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server, asyncio.timeout(60):
        keeper = asyncio.create_task(keep_alive(server))
        break_restarts(monkeypatch, attempts=4)
        await server.kill()
        await until(lambda: server.alive or keeper.done())
        assert not keeper.done()
        keeper.cancel()


async def test_keep_alive_ends_a_crash_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes up and dies, whatever is done."""
    restarts = []

    async def dies_at_once(server: RedisServer) -> None:
        restarts.append(server)

    monkeypatch.setattr(RedisServer, "restart", dies_at_once)
    monkeypatch.setattr("penstock.deploy.run.connection.LOOK_S", 0.001)
    async with RedisServer(tmp_path, PASSWORD) as server, asyncio.timeout(60):
        await server.kill()
        with pytest.raises(RedisLost, match=r"again and again \(60 restarts used up within 600 s\)"):
            await keep_alive(server)
    assert len(restarts) == 60


class Idle:
    """A role that does nothing until it is stopped."""

    pid, restarts, state = None, 0, "running"

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()


class IdlePlacement(LocalPlacement):
    """Kills the run's redis-server once all roles are placed."""

    def place(self, role: Role, run: RunDir) -> Idle:
        if role.kind == "trainer":
            (redis,) = living_below(os.getpid(), "redis-server")
            redis.kill()
        return Idle(role.spec(run.logs))


async def test_run_ends_where_its_redis_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_restarts(monkeypatch, attempts=99)
    config = RunConfig(
        name="mine",
        model="m",
        data=DataConfig(train="t"),
        runs_dir=str(tmp_path),
        transfer_queue=TransferQueueConfig(deadline_s=1.0),
    )
    async with asyncio.timeout(60):
        with pytest.raises(RedisLost, match="did not come up again in 5 attempts: port 6379"):
            await launch(config, placement=IdlePlacement())
    ended = json.loads(RunDir.of(config).ended.read_text())
    assert "redis-server ended and did not come up again" in ended["why"]
