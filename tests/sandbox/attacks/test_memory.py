"""More memory than a box has, in whatever it may lie."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import pytest
from tests.sandbox.attacks.targets import CONFIG, Target, attack

from penstock.sandbox import RunResult, Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


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


REFUSALS = ("MemoryError", "PermissionError", "OSError", "Cannot allocate memory")


def contained(result: RunResult) -> bool:
    """Ended for its memory or, where no cgroup stands, refused whatever would take more."""
    return result.limit == "memory" or (bool(result.exit_code) and any(word in result.stderr for word in REFUSALS))


@pytest.mark.parametrize(
    "code",
    ["x = b'x' * (4 << 30)", NAMELESS_FILE, ANONYMOUS_MAP],
    ids=["one process", "a file without a name", "shared"],
)
async def test_attack_four_gigabytes(session: Session, code: str) -> None:
    assert contained(await attack(session, code, timeout_s=30.0))


async def test_attack_four_gigabytes_by_a_command(session: Session) -> None:
    assert contained(await session.run(["python3", "-c", "x = b'x' * (4 << 30)"], timeout_s=30.0))
    assert (await session.run(["true"])).limit is None  # reported once


FILL = "kept = bytes([1]) * (48 << 20); time.sleep(1000)"
MANY = f"""
import os, time
for _ in range(6):
    if os.fork() == 0:
        {FILL}
"""
LOOK_DEAD = f"""
import ctypes, os, threading, time
def fill(): {FILL}
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=fill).start()
        ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)
"""
UNREADABLE = f"""
import os, shutil, subprocess, time
shutil.copy(os.path.realpath('/usr/bin/python3'), '/tmp/hidden')
os.chmod('/tmp/hidden', 0o111)
for _ in range(6): subprocess.Popen(['/tmp/hidden', '-c', 'import time; {FILL}'])
"""
TOGETHER = {"many": MANY, "look dead": LOOK_DEAD, "cannot be read": UNREADABLE}


@pytest.mark.parametrize("code", TOGETHER.values(), ids=TOGETHER)
async def test_attack_memory_of_processes_together(session: Session, code: str) -> None:
    """Each stays below the box's limit. All of them together do not.

    Where the kernel ends some of them only, the call goes on: it waits long enough for all of them to have filled.
    """
    assert (await attack(session, code + "time.sleep(20)", timeout_s=300.0)).limit == "memory"


async def test_attack_memory_of_daemons_between_calls(session: Session) -> None:
    """Nothing runs any more when they take it; the next calls find a box that works, without them."""
    await session.run(["python3", "-c", MANY])
    async with asyncio.timeout(60):
        while not await few_are_left(session):
            await asyncio.sleep(0.1)


async def few_are_left(session: Session) -> bool:
    """Two may stay; sh and grep carry the words too."""
    left = await session.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '48 << 20'"])
    return left.exit_code in (0, 1) and int(left.stdout) <= 4


PAGES_IN_PIPES = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
class Part(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
pipes = []
for _ in range(100):
    made = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(14)
    made.write(bytes([1]) * (4 << 20))
    start = ctypes.addressof(ctypes.c_char.from_buffer(made))
    pipes.append(os.pipe())
    if libc.vmsplice(pipes[-1][1], ctypes.byref(Part(((start >> 21) + 1) << 21, 4096)), 1, 0) < 0:
        raise OSError(ctypes.get_errno(), 'vmsplice')
    libc.munmap(start, 4 << 20)
print('HELD')
"""
MAPS_OF_ZERO = """
import mmap, os
kept, zero = [], os.open('/dev/zero', os.O_RDWR)
for _ in range(32):
    kept.append(mmap.mmap(zero, 8 << 20))
    kept[-1].write(bytes([1]) * (8 << 20))
    kept[-1].madvise(4)
print('HELD')
"""
EVENTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/tmp/watched', exist_ok=True)
watches = 0
while (fd := libc.inotify_init1(0)) >= 0:
    libc.inotify_add_watch(fd, b'/tmp/watched', 0xfff)
    watches += 1
if not watches: raise OSError(ctypes.get_errno(), 'inotify_init1')
for turn in range(3000):
    path = '/tmp/watched/' + str(turn % 2) * 250
    os.close(os.open(path, os.O_CREAT))
    os.unlink(path)
print('HELD')
"""
HIDDEN = {"pages in pipes": PAGES_IN_PIPES, "maps of /dev/zero": MAPS_OF_ZERO, "events": EVENTS}


@pytest.mark.parametrize("code", HIDDEN.values(), ids=HIDDEN)
async def test_attack_memory_that_no_process_shows(session: Session, code: str) -> None:
    """Of pages that are mapped nowhere only a cgroup knows; without one they are refused."""
    assert contained(await attack(session, code, timeout_s=60.0))


async def test_attack_memory_that_belongs_to_no_process(session: Session) -> None:
    """System V segments outlive those who made them: what nobody holds goes with the run, or the next would starve."""
    result = await attack(session, SYSTEM_V, timeout_s=30.0)
    assert result.limit == "memory" or result.stderr.endswith("OSError: shmget\n")
    headings, *segments = (await session.run(["cat", "/proc/sysvipc/shm"])).stdout.splitlines()
    assert (headings.split()[:2], segments) == (["key", "shmid"], [])


LOCKS = """
import fcntl, struct, time
files = [open(f'/tmp/locked-{number}', 'w') for number in range(200)]
lock = lambda at: struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, at, 1, 0)
for at in range(400, 0, -2):
    for file in files: fcntl.fcntl(file, COMMAND, lock(at))
time.sleep(1000)
"""


async def test_attack_memory_in_the_records_of_file_locks(session: Session, target: Target) -> None:
    """Without a cgroup of its memory a box has few: its processes', since those of open files are refused. With one the
    kernel counts them where it can, and they go with the command that holds them."""
    locks = LOCKS.replace("COMMAND", "fcntl.F_SETLK")
    if not target.counts_memory:
        assert (await attack(session, locks, timeout_s=5.0)).limit in ("memory", "wall")
        assert len(Path("/proc/locks").read_text().splitlines()) < 1000
        return
    assert (await attack(session, locks, timeout_s=60.0)).limit == "memory"
    result = await attack(session, LOCKS.replace("COMMAND", "38"), timeout_s=60.0)
    assert result.stderr.endswith("PermissionError: [Errno 1] Operation not permitted\n")


async def test_a_database_in_a_file_keeps_its_locks(session: Session) -> None:
    code = "import sqlite3\nwith sqlite3.connect('/tmp/some.db') as db: db.execute('create table t (x)')"
    assert (await session.run(["python3", "-c", code])).exit_code == 0


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


async def test_attack_memory_of_a_living_daemon_stays(session: Session, target: Target) -> None:
    """The child sleeps until its box ends; the first segment it holds, the second is of a maker that lives.

    Where a box's memory is counted there are no System V objects.
    """
    await session.run(["python3", "-c", DAEMON])
    segments = (await session.run(["cat", "/proc/sysvipc/shm"])).stdout.splitlines()[1:]
    assert [line.split()[0] for line in segments] == ([] if target.counts_memory else ["7", "8"])


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


LETTERS = """
import socket, time
kept = []
for _ in range(120):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept.append(right)
    left.setblocking(False)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    try:
        while True: left.send(bytes(100_000))
    except BlockingIOError: left.close()
time.sleep(1000)
"""


async def test_attack_memory_in_unix_sockets_whose_sender_left(session: Session) -> None:
    """What was sent counts with its sender, which is closed: 120 sockets of some 400 kB in each of 8 processes."""
    code = f"import os\nfor _ in range(8):\n    if os.fork() == 0: exec({LETTERS!r})\n__import__('time').sleep(1000)"
    assert (await attack(session, code, timeout_s=60.0)).limit == "memory"


async def test_attack_memory_in_the_buffers_of_sockets(session: Session) -> None:
    """Datagrams that nobody reads: half a gigabyte where only the box's memory is counted and its sockets are not."""
    result = await attack(session, DATAGRAMS, timeout_s=60.0)
    assert result.limit == "memory" or int(result.stdout) <= CONFIG.memory_mb << 20
