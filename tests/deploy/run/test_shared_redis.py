"""`penstock ledger`: a Redis for other machines, which is the last to go when a scheduler stops everything at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.living import living_below

from penstock.transfer_queue.redis import free_port, role_users

pytestmark = pytest.mark.redis
REPOSITORY = Path(__file__).parents[3]
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
        wait_for(self.answers)

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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    wait_for(lambda: queue.redis_pid() not in (None, first) and queue.answers())
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


def test_it_listens_where_it_is_told_and_on_loopback(start) -> None:
    queue = start()
    for host, there in (("127.0.0.1", True), ("127.0.0.2", True), ("127.0.0.3", False)):
        with socket.socket() as probe:
            assert (probe.connect_ex((host, queue.port)) == 0) == there


def test_redis_server_of_a_loopback_name_listens_everywhere(start) -> None:
    """Debian's /etc/hosts: a machine's own name is 127.0.1.1 to itself, and its address to others."""
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        pytest.skip("this machine's name is no loopback address")
    queue = start(host=socket.gethostname())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.3", queue.port)) == 0


def test_without_a_password_it_does_not_start(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_REDIS_PASSWORD"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock.deploy.cli",
            "redis-server",
            str(tmp_path),
            "--host",
            "localhost",
            "--port",
            "1",
        ],
        env={**environment, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "PENSTOCK_REDIS_PASSWORD is not set" in done.stderr
