"""The redis-server of a run is kept alive, or the run ends; a shared one outlives the head for its last writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.deploy.conftest import REPOSITORY
from tests.living import living_below
from tests.ports import free_port
from tests.until import until, until_in_threads
from typer.testing import CliRunner

from penstock.common import Backoff
from penstock.deploy import RoleSpec, RunConfig, RunDir, app
from penstock.deploy.costs import CostConfig
from penstock.deploy.run.accounts import CostAccounts
from penstock.deploy.run.connection import RedisLost, keep_alive, serve
from penstock.deploy.run.launcher import launch
from penstock.deploy.run.plan import Role
from penstock.deploy.run.processes import EndedProcess
from penstock.deploy.run.supervisor import LocalPlacement
from penstock.trainer import DataConfig
from penstock.transfer_queue import QueueError, RedisServer, TransferQueueConfig
from penstock.transfer_queue.redis import role_users

pytestmark = pytest.mark.redis
PASSWORD, AGENT = "the-owners-password", "the-agents-password"


class SharedRedis:
    def __init__(self, folder: Path, *words: str, host: str = "127.0.0.2") -> None:
        self.host = host
        self.port = free_port()
        users = folder / "users.acl"
        users.write_text("".join(f"{line}\n" for line in role_users("mine", {"agent": AGENT})))
        self.log = folder / "log"
        argv = ["redis-server", str(folder / "redis"), "--host", host, "--port", str(self.port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.deploy.cli", *argv, "--users", str(users), *words],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PENSTOCK_REDIS_PASSWORD": PASSWORD},
                stderr=log,
            )
        # Redis answers before its keeper serves, which ends at once if it is stopped earlier.
        until_in_threads(lambda: self.answers() and "queue at" in self.log.read_text())

    def client(self, user: str = "default", password: str = PASSWORD) -> redis.Redis:
        return redis.Redis(self.host, self.port, username=user, password=password, protocol=2)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def redis_pid(self) -> int | None:
        return next((process.pid for process in living_below(self.process.pid, "redis-server")), None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SharedRedis]]:
    started: list[SharedRedis] = []

    def begin(*words: str, **options: str) -> SharedRedis:
        started.append(SharedRedis(tmp_path, *words, **options))
        return started[-1]

    yield begin
    for queue in started:
        queue.process.terminate()
        queue.process.wait(60)


def test_redis_server_outlives_the_head_on_sigterm(start, tmp_path: Path) -> None:
    """TERM to redis-server and to what keeps it, as Slurm does it: the head still writes, and says when it is done."""
    connect_env = tmp_path / "connect.env"
    connect_env.touch()
    queue = start("--linger-while", str(connect_env), "--linger-s", "200")
    with queue.client() as client:
        client.set("before", 1)
    first = queue.redis_pid()
    assert first
    for pid in (first, queue.process.pid):
        os.kill(pid, signal.SIGTERM)
    until_in_threads(lambda: queue.answers() and queue.redis_pid() not in (None, first))
    with queue.client() as client:
        client.set("after", 2)
        assert client.get("before") == b"1"
    connect_env.unlink()
    assert queue.process.wait(120) == 0


@pytest.mark.parametrize("words", [(), ("--linger-s", "1", "--linger-while", __file__)])
def test_it_does_not_stay_for_ever(start, words: tuple[str, ...]) -> None:
    queue = start(*words)
    queue.process.terminate()
    assert queue.process.wait(120) == 0


async def test_a_disk_that_does_not_answer_does_not_keep_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    asked, answer = threading.Event(), threading.Event()

    class HangingFile(type(tmp_path)):  # type: ignore[misc]
        def exists(self, **_: bool) -> bool:
            asked.set()
            return answer.wait(60)

    port = free_port()
    serving = asyncio.create_task(serve(RedisServer(tmp_path / "redis", PASSWORD, port=port), HangingFile("f"), 0.5))
    try:
        await until(lambda: "queue at" in caplog.text)
        serving.cancel()
        await until(asked.is_set)
        done, _ = await asyncio.wait([serving], timeout=30)
        assert done
        assert not is_open("127.0.0.1", port)
    finally:
        answer.set()


def test_roles_have_their_own_rights(start) -> None:
    queue = start()
    with queue.client("agent", AGENT) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("somebody-elses", 1)
    with pytest.raises(redis.exceptions.AuthenticationError), queue.client("agent", "guessed") as client:
        client.ping()


def is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_it_listens_at_its_address_and_on_loopback(start) -> None:
    port = start().port
    assert [is_open(host, port) for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3")] == [True, True, False]


def test_redis_server_of_a_loopback_name_listens_everywhere(start) -> None:
    """Debian's /etc/hosts: a machine's own name is 127.0.1.1 to itself, and its address to others."""
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip("this machine's name is no loopback address")
    assert is_open("127.0.0.3", start(host=socket.gethostname()).port)


def test_without_a_password_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_PASSWORD", raising=False)
    done = CliRunner().invoke(app, ["redis-server", str(tmp_path), "--host", "localhost", "--port", "1"])
    assert (done.exit_code, "PENSTOCK_REDIS_PASSWORD is not set" in done.stderr) == (2, True)


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


async def test_a_redis_that_is_lost_in_the_linger_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its server the command ends at once with the cause, not after `linger_s`."""
    file, server = tmp_path / "connect.env", RedisServer(tmp_path / "redis", PASSWORD, port=free_port())
    file.touch()
    caplog.set_level("INFO")
    break_restarts(monkeypatch, attempts=99)
    serving = asyncio.create_task(serve(server, file, 3600.0))
    await until(lambda: "queue at" in caplog.text)
    await server.kill()
    serving.cancel()
    async with asyncio.timeout(200):
        with pytest.raises(RedisLost, match="did not come up again in 5 attempts"):
            await serving


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

    pid, restarts, state, has_failed = None, 0, "running", False

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()

    def take_ended(self) -> list[EndedProcess]:
        return []


class IdlePlacement(LocalPlacement):
    """Kills the run's redis-server once all roles are placed."""

    def place(self, role: Role, run: RunDir) -> Idle:
        if role.kind == "trainer":
            # The newest: this process may have others, of tests that ran before.
            max(living_below(os.getpid(), "redis-server"), key=lambda process: process.create_time()).kill()
        return Idle(role.spec(run.logs))


class Resting(LocalPlacement):
    """No role does anything."""

    def place(self, role: Role, run: RunDir) -> Idle:
        return Idle(role.spec(run.logs))


async def test_a_run_ends_in_order_when_its_budget_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostConfig(device_hour=1.0, budget=3.0)
    config = RunConfig(name="mine", model="m", data=DataConfig(train="t"), runs_dir=str(tmp_path), costs=costs)
    monkeypatch.setattr(CostAccounts, "cost", lambda *_: {"trained": 2.5, "filtered": 1.0})
    async with asyncio.timeout(60):
        summary = await launch(config, placement=Resting())
    assert json.loads(summary.read_text())["ended"] == "the budget is spent: 3.5 of 3 (costs.budget)"
    assert json.loads(RunDir.of(config).ended.read_text())["failed"] is False


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
    assert ended["failed"] is True
