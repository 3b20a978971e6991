"""`penstock ledger`: a Redis for other machines, which is the last to go when a scheduler stops everything at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.deploy.conftest import REPOSITORY
from tests.living import living_below
from tests.until import until_in_threads
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.transfer_queue.redis import free_port, role_users

pytestmark = pytest.mark.redis
PASSWORD, AGENT = "the-owners-password", "the-agents-password"


class TransferQueue:
    def __init__(self, folder: Path, *words: str, host: str = "127.0.0.2") -> None:
        self.host = host
        self.port = free_port()
        users = folder / "users.acl"
        users.write_text("".join(f"{line}\n" for line in role_users("mine", {"agent": AGENT})))
        argv = ["redis-server", str(folder / "redis"), "--host", host, "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.deploy.cli", *argv, "--users", str(users), *words],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PENSTOCK_REDIS_PASSWORD": PASSWORD},
            stderr=subprocess.PIPE,
            text=True,
        )
        until_in_threads(self.answers)

    def client(self, user: str = "default", password: str = PASSWORD) -> redis.Redis:
        return redis.Redis(self.host, self.port, username=user, password=password, protocol=2)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def redis_pid(self) -> int | None:
        return next((process.pid for process in living_below(self.process.pid, "redis-server")), None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TransferQueue]]:
    started: list[TransferQueue] = []

    def begin(*words: str, **options: str) -> TransferQueue:
        started.append(TransferQueue(tmp_path, *words, **options))
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
    until_in_threads(lambda: queue.redis_pid() not in (None, first) and queue.answers())
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
