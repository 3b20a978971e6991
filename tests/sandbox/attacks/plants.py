"""What a host has that no box may reach, planted for real: secrets, sockets, a Redis, processes of other users.

Everything is as open as it can be to the host's own users, so that only the box's walls are in the way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.sandbox.orphans import MARK

SECRET = f"hush-{os.urandom(8).hex()}"
NOBODY = 65534
_START_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    folder: Path
    """Readable and writable by everybody: `checkpoint`, a file with the secret; `redis.sock`; `host.sock`."""
    redis_port: int
    """On 127.0.0.1, without a password: nobody but the box's walls keeps it."""
    tcp: socket.socket
    udp: socket.socket
    """Both on every address of the host; `tcp` listens and never accepts, so that a visitor stays in its queue."""
    abstract: socket.socket
    """A listener whose name is no file: ``"\\0" + MARK``."""
    victims: tuple[subprocess.Popen[bytes], ...]
    """A process of root and one of nobody."""

    @property
    def port(self) -> int:
        return int(self.tcp.getsockname()[1])

    @property
    def udp_port(self) -> int:
        return int(self.udp.getsockname()[1])

    @property
    def redis_socket(self) -> Path:
        return self.folder / "redis.sock"

    def visitors(self) -> list[str]:
        """Whoever connected since the last call."""
        found = []
        for listener in (self.tcp, self.abstract):
            with contextlib.suppress(BlockingIOError):
                connection, peer = listener.accept()
                connection.close()
                found.append(f"{listener.family.name} {peer}")
        with contextlib.suppress(BlockingIOError):
            found.append(f"datagram {self.udp.recv(100)!r}")
        return found


@contextlib.contextmanager
def planted_host() -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix=f"{MARK}-"))
    folder.chmod(0o777)
    (folder / "checkpoint").write_text(SECRET)
    (folder / "checkpoint").chmod(0o666)
    os.environ["PENSTOCK_TEST_SECRET"] = SECRET
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(os.environ.pop, "PENSTOCK_TEST_SECRET", None)
        port = _redis(stack, folder)
        tcp, udp, abstract = (stack.enter_context(made) for made in _sockets())
        victims = tuple(_victim(stack, uid) for uid in (0, NOBODY))
        yield Host(folder, port, tcp, udp, abstract, victims)


def _sockets() -> tuple[socket.socket, socket.socket, socket.socket]:
    tcp = socket.create_server(("0.0.0.0", 0), backlog=64)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("0.0.0.0", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{MARK}")
    abstract.listen(64)
    for made in (tcp, udp, abstract):
        made.setblocking(False)
    return tcp, udp, abstract


def _redis(stack: contextlib.ExitStack, folder: Path) -> int:
    """A trainer's Redis that holds the secret under the key `secret`; returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    path = folder / "redis.sock"
    command = f"redis-server --port {port} --bind 127.0.0.1 --unixsocket {path} --unixsocketperm 777 --save '' --dir"
    process = subprocess.Popen(["sh", "-c", f"exec {command} {folder}"], stdout=subprocess.DEVNULL)
    stack.callback(_stop, process)
    deadline = time.monotonic() + _START_DEADLINE_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(f"SET secret {SECRET}\r\n".encode())
                assert client.recv(100) == b"+OK\r\n"
                return port
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)


def _victim(stack: contextlib.ExitStack, uid: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "100000"], user=uid if os.geteuid() == 0 else None)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=60)
