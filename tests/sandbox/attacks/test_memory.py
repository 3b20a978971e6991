"""More memory than a box has, in whatever it may lie."""

from __future__ import annotations

import pytest
from tests.sandbox.attacks.targets import CONFIG, attack

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


MANY = """
import os
for _ in range(12):
    if os.fork() == 0:
        x = b'x' * (350 << 20)
        os._exit(0)
for _ in range(12):
    os.wait()
"""
NAMELESS_FILE = "import os\nfd = os.memfd_create('x')\nfor _ in range(4096):\n    os.write(fd, b'x' * (1 << 20))"
ANONYMOUS_MAP = "import mmap\nm = mmap.mmap(-1, 4 << 30)\nfor i in range(0, 4 << 30, 4096): m[i] = 1"
PIPES = """
import fcntl, os
def fill():
    while True:
        try:
            fd = os.pipe()[1]
        except OSError:
            return os.fork() == 0 and fill()
        os.set_blocking(fd, False)
        fcntl.fcntl(fd, 1031, 1 << 20)
        try:
            while True: os.write(fd, bytes(1 << 16))
        except BlockingIOError: pass
fill()
"""
SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(512):
    segment = libc.shmget(0, 8 << 20, 0o1666)
    if segment < 0: raise OSError('shmget')
    ctypes.memset(libc.shmat(segment, None, 0), 1, 8 << 20)
"""


@pytest.mark.parametrize(
    "code",
    ["x = b'x' * (4 << 30)", MANY, NAMELESS_FILE, ANONYMOUS_MAP],
    ids=["one process", "many processes", "a file without a name", "shared"],
)
async def test_attack_four_gigabytes(session: Session, code: str) -> None:
    assert (await attack(session, code, timeout_s=30.0)).limit == "memory"


async def test_attack_four_gigabytes_by_a_command(session: Session) -> None:
    result = await session.run(["python3", "-c", "x = b'x' * (4 << 30)"], timeout_s=30.0)
    assert (result.exit_code, result.limit) == (None, "memory")


async def test_attack_memory_that_belongs_to_no_process(session: Session) -> None:
    """System V segments outlive those who made them: what nobody holds goes with the run, or the next would starve."""
    result = await attack(session, SYSTEM_V, timeout_s=30.0)
    assert result.limit == "memory" or result.stderr.endswith("OSError: shmget\n")
    headings, *segments = (await session.run(["cat", "/proc/sysvipc/shm"])).stdout.splitlines()
    assert (headings.split()[:2], segments) == (["key", "shmid"], [])


DAEMON = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
ready, done = os.pipe()
if os.fork() == 0:
    kept = libc.shmget(7, 1 << 20, 0o1666)
    libc.shmat(kept, None, 0)
    libc.shmget(8, 1 << 20, 0o1666)
    os.write(done, b'x')
    time.sleep(1000)
os.read(ready, 1)
"""


async def test_attack_memory_of_a_living_daemon_stays(session: Session) -> None:
    """The child sleeps until its box ends; the first segment it holds, the second is of a maker that lives."""
    await session.run(["python3", "-c", DAEMON])
    segments = (await session.run(["cat", "/proc/sysvipc/shm"])).stdout.splitlines()[1:]
    assert [line.split()[0] for line in segments] == ["7", "8"]


async def test_attack_memory_in_the_buffers_of_pipes(session: Session) -> None:
    result = await attack(session, PIPES, timeout_s=3.0)
    assert result.limit in ("memory", "wall") or result.exit_code == 1


DATAGRAMS = """
import os, socket, time
def fill():
    sockets = []
    for _ in range(230):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind(('127.0.0.1', 0))
        sockets.append(made)
        try:
            for _ in range(4): made.sendto(bytes(60_000), made.getsockname())
        except OSError: pass
    return sockets
ready, done = os.pipe()
for _ in range(10):
    if os.fork() == 0:
        kept = fill()
        os.write(done, b'x')
        time.sleep(1000)
for _ in range(10): os.read(ready, 1)
print(sum(int(line.split()[4].split(':')[1], 16) for line in open('/proc/net/udp').readlines()[1:]))
"""


async def test_attack_memory_in_the_buffers_of_sockets(session: Session) -> None:
    """Datagrams that nobody reads: half a gigabyte where only the box's memory is counted and its sockets are not."""
    result = await attack(session, DATAGRAMS, timeout_s=20.0)
    assert result.limit == "memory" or int(result.stdout) <= CONFIG.memory_mb << 20
