"""Starts a real redis-server for one run: own directory, append-only file, password, loopback port or unix socket.

With TLS, users of its own, a memory limit or as a node of a cluster where asked: see `redis_config`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, RedisError

from penstock.transfer_queue.append_only_file import mend_append_only_file
from penstock.transfer_queue.directory_lock import DirectoryLock
from penstock.transfer_queue.queue import QueueError
from penstock.transfer_queue.redis_binary import find_redis_server
from penstock.transfer_queue.redis_config import ServerOptions, check_free, free_port


class RedisServer:
    """A redis-server child. `directory` keeps its data, so that a later start goes on with them.

    async with RedisServer(directory, password) as server:
        queue = await RedisTransferQueue.connect(server.url, run, config, password=password)

    `start` returns once it answers; `stop` ends it cleanly; a child outlives neither. Where ``setpriv`` exists, the
    kernel ends it with the thread that started it, however that one dies; elsewhere `stop` must be reached.
    """

    def __init__(
        self,
        directory: Path,
        password: str,
        *,
        appendfsync: str = "everysec",
        host: str = "127.0.0.1",
        port: int = 0,
        unix_socket: Path | None = None,
        users: Sequence[str] = (),
        maxmemory: int = 0,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        tls_ca: Path | None = None,
        cluster: bool = False,
        start_timeout_s: float = 60.0,
    ) -> None:
        """The options are those of `ServerOptions`."""
        self.directory = Path(directory).absolute()
        self._options = ServerOptions(
            password,
            appendfsync=appendfsync,
            host=host,
            port=port,
            unix_socket=unix_socket and Path(unix_socket).absolute(),
            users=tuple(users),
            maxmemory=maxmemory,
            tls_cert=tls_cert and Path(tls_cert).absolute(),
            tls_key=tls_key and Path(tls_key).absolute(),
            tls_ca=tls_ca and Path(tls_ca).absolute(),
            cluster=cluster,
        )
        self.port = port
        """0 until it is started, and with a unix socket."""
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = DirectoryLock(self.directory, "another redis-server of ours")

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
        return self._options.url(self.port)

    @property
    def host(self) -> str:
        return self._options.host

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_file(self) -> Path:
        return self.directory / "redis.log"

    async def start(self) -> None:
        """Start and wait until it answers. Raises `QueueError` that says what is in the way and how to mend it."""
        binary = await asyncio.to_thread(find_redis_server)
        self._options.check_version(binary)
        self._prepare()
        try:
            await asyncio.to_thread(mend_append_only_file, binary.path, self.directory)
            await self._spawn(binary.path)
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
            self._lock.release()

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
        self._lock.take()
        try:
            self._choose_port()
            self._write_config()
        except BaseException:
            self._lock.release()
            raise

    def _choose_port(self) -> None:
        if not self._options.unix_socket:
            self.port = self.port or free_port(cluster=self._options.cluster)
            check_free(self.port, cluster=self._options.cluster)

    def _write_config(self) -> None:
        config = self.directory / "redis.conf"
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(self._options.config(self.directory, self.log_file, self.port))

    async def _spawn(self, binary: str) -> None:
        with self.log_file.open("ab") as log:  # what is wrong in its configuration it says before it opens its log
            self._process = await asyncio.create_subprocess_exec(
                *_dies_with_parent(),
                binary,
                str(self.directory / "redis.conf"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _until_up(self) -> None:
        client = aioredis.Redis.from_url(self.url, password=self._options.password, socket_timeout=None, protocol=2)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers(client):  # noqa: ASYNC110 - another process: there is no event
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise QueueError(
                f"redis-server did not answer within {self._start_timeout_s} s; see {self.log_file}"
            ) from error
        finally:
            await client.aclose()

    async def _answers(self, client: aioredis.Redis) -> bool:
        if not self.alive:
            raise QueueError(f"redis-server ended at once: {self._last_words()} (whole log: {self.log_file})")
        try:
            return bool(await client.execute_command("PING"))
        except AuthenticationError as error:
            raise QueueError(f"port {self.port} is in use: another Redis answers there") from error
        except (RedisError, OSError):
            return False

    def _last_words(self) -> str:
        try:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return " | ".join(lines[-3:]) or "it wrote no log"


def _dies_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
