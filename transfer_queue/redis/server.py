"""Starts a real redis-server for one run: own directory, append-only file, password, loopback port or unix socket.

With TLS, ACL users, a memory limit, or as a cluster node on request: see `server_config`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, RedisError

from penstock.common import FileLock
from penstock.transfer_queue.errors import QueueError
from penstock.transfer_queue.redis.server_config import (
    FileSync,
    ServerOptions,
    check_free,
    find_redis_server,
    free_port,
    repair_append_only_file,
    server_environment,
)

logger = logging.getLogger(__name__)
STARTS = 4
"""Starts in a row of a redis-server that a signal ends before it answers."""


class KilledInStart(QueueError):
    """A signal ended redis-server before it answered; it may be started again at once."""


class RedisServer:
    """A redis-server child. `directory` keeps its data for later starts.

    async with RedisServer(directory, password) as server:
        queue = await RedisTransferQueue.connect(server.url, run, config, password=password)

    `start` returns once it answers; `stop` ends it cleanly. Where ``setpriv`` exists, the kernel ends it when the
    thread that started it dies; elsewhere `stop` must run.
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
        """The options are those of `ServerOptions`; `start_timeout_s`: see `start`."""
        self.directory = Path(directory).absolute()
        self._options = ServerOptions(
            password,
            appendfsync=appendfsync,
            host=host,
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
        self._sync: FileSync | None = None
        self._lock = FileLock(
            self.directory / "lock", "another redis-server of ours is running there", error=QueueError, mode=0o600
        )

    async def __aenter__(self) -> RedisServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """URL without the password. Known once started."""
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
        """Start it and wait until it answers. Raises `QueueError` with the cause and the fix.

        While it loads its file, `start_timeout_s` is the longest time without progress: a large file takes minutes.
        Killed by a signal meanwhile, it is started again, `STARTS` times in all.
        """
        for _ in range(STARTS - 1):
            try:
                return await self._start_once()
            except KilledInStart as error:
                logger.warning("%s; started again", error)
        await self._start_once()

    async def _start_once(self) -> None:
        binary = await asyncio.to_thread(find_redis_server)
        self._options.check_version(binary)
        self._prepare()
        try:
            await asyncio.to_thread(repair_append_only_file, binary.path, self.directory)
            await self._spawn(binary.path)
            self._start_sync()
            await self._until_up()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, timeout_s: float = 20.0) -> None:
        """Stop it: SIGTERM (it completes its file), SIGKILL after `timeout_s`. A second call does nothing."""
        process, self._process = self._process, None
        sync, self._sync = self._sync, None
        try:
            if process is not None and process.returncode is None:
                await _end(process, timeout_s)
            if sync is not None:
                await asyncio.to_thread(sync.stop)
        finally:
            self._lock.release()

    async def restart(self) -> None:
        """Stop it if it runs, and start it with the same directory and address."""
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """SIGKILL, like a crash; for tests."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock.acquire()
        try:
            if not self._options.unix_socket:
                self.port = self.port or free_port(cluster=self._options.cluster)
                check_free(self.port, cluster=self._options.cluster)
            self._write_config()
        except BaseException:
            self._lock.release()
            raise

    def _write_config(self) -> None:
        config = self.directory / "redis.conf"
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)
            file.write(self._options.config(self.directory, self.log_file, self.port))

    async def _spawn(self, binary: str) -> None:
        setpriv = shutil.which("setpriv")
        dies_with_parent = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
        with self.log_file.open("ab") as log:  # what is wrong in its configuration it says before it opens its log
            self._process = await asyncio.create_subprocess_exec(
                *dies_with_parent,
                binary,
                str(self.directory / "redis.conf"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(),
                start_new_session=True,
            )

    def _start_sync(self) -> None:
        """Syncs its file every second, unless Redis does before it answers."""
        process, loop = self._process, asyncio.get_running_loop()
        if self._options.appendfsync == "always" or process is None:
            return

        def end_unsynced(error: OSError) -> None:
            """Kills redis-server, which does so itself under ``always``; its keeper starts it again from the disk."""
            what = "the append-only file cannot be synced"
            logger.error("%s: %s (%s): redis-server is ended", self.directory, what, error.strerror)
            if process.returncode is None:
                process.kill()

        def failed(error: OSError) -> None:
            with suppress(RuntimeError):  # the loop is closed: its owner is gone, and the server with it
                loop.call_soon_threadsafe(end_unsynced, error)

        self._sync = FileSync(self.directory, failed)

    async def _until_up(self) -> None:
        client = aioredis.Redis.from_url(self.url, password=self._options.password, socket_timeout=None, protocol=2)
        clock, loaded = asyncio.get_running_loop().time, 0
        try:
            async with asyncio.timeout(self._start_timeout_s) as deadline:
                while not await self._answers(client):
                    before, loaded = loaded, await self._loaded_bytes(client)
                    if loaded > before:
                        deadline.reschedule(clock() + self._start_timeout_s)
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise QueueError(
                f"redis-server did not answer, nor load more of its file ({loaded} bytes so far), within"
                f" {self._start_timeout_s:g} s (transfer_queue.start_timeout_s); see {self.log_file}"
            ) from error
        finally:
            await client.aclose()

    async def _answers(self, client: aioredis.Redis) -> bool:
        if (ended := self._process.returncode if self._process else 0) is not None:
            if ended < 0:
                raise KilledInStart(f"signal {-ended} ended redis-server before it answered; see {self.log_file}")
            raise QueueError(f"redis-server ended at once: {self._log_tail()} (whole log: {self.log_file})")
        try:
            return bool(await client.execute_command("PING"))
        except AuthenticationError as error:
            raise QueueError(f"port {self.port} is in use: another Redis answers there") from error
        except (RedisError, OSError):
            return False

    async def _loaded_bytes(self, client: aioredis.Redis) -> int:
        """Returns the bytes of its file that it has loaded; 0 if it does not answer."""
        try:
            info = await client.info("persistence")
        except (RedisError, OSError):
            return 0
        return int(info.get("loading_loaded_bytes", 0))

    def _log_tail(self) -> str:
        try:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return " | ".join(lines[-3:]) or "it wrote no log"


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
