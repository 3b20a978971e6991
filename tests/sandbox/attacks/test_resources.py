"""More than its share: processes, memory, disk, descriptors, output, time."""

from __future__ import annotations

import asyncio

import pytest
from targets import SHM_MB, CONFIG, Target, attack, ended_by

from penstock.sandbox.protocol import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


# ---- processes

FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
COUNT = "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])"


async def test_fork_bomb(session: Session, target: Target) -> None:
    before = int((await session.run_python(COUNT)).stdout)
    result, _ = await asyncio.gather(attack(session, FORK_BOMB, timeout_s=0.7), target.visit_neighbour())
    assert ended_by(result, "wall")
    assert int((await session.run_python(COUNT)).stdout) == before


async def test_fork_bomb_as_a_command_spares_the_interpreter(session: Session) -> None:
    await session.run_python("kept = 1")
    result = await session.run(["sh", "-c", "f() { f | f & }; f; sleep 60"], timeout_s=0.7)
    # a shell that cannot fork may give up by itself before its time is over
    assert (result.exit_code, result.limit) in ((None, "wall"), (2, None), (254, None))
    assert result.state_lost or (await session.run_python("kept")).stdout == "1\n"


async def test_fork_bomb_of_threads(session: Session) -> None:
    code = """
import threading, time
for n in range(10_000):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
    result = await attack(session, code)
    assert result.exit_code == 1
    assert result.stderr.endswith("RuntimeError: can't start new thread\n")


async def test_a_box_full_of_processes_still_runs_commands(session: Session) -> None:
    code = """
import os, signal
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            signal.pause()
    except OSError:
        break
"""
    assert (await attack(session, code)).exit_code == 0
    assert (await session.run(["echo", "room"])).stdout == "room\n"


# ---- memory

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
async def test_four_gigabytes(session: Session, code: str) -> None:
    assert (await attack(session, code, timeout_s=30.0)).limit == "memory"


async def test_four_gigabytes_by_a_command(session: Session) -> None:
    result = await session.run(["python3", "-c", "x = b'x' * (4 << 30)"], timeout_s=30.0)
    assert (result.exit_code, result.limit) == (None, "memory")


async def test_memory_that_belongs_to_no_process(session: Session) -> None:
    """System V segments outlive those who made them, and count against the box for as long as it is there."""
    result = await attack(session, SYSTEM_V, timeout_s=30.0)
    assert result.limit == "memory" or result.stderr.endswith("OSError: shmget\n")


async def test_memory_in_the_buffers_of_pipes(session: Session) -> None:
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


async def test_memory_in_the_buffers_of_sockets(session: Session) -> None:
    """Datagrams that nobody reads: half a gigabyte where only the box's memory is counted and its sockets are not."""
    result = await attack(session, DATAGRAMS, timeout_s=20.0)
    assert result.limit == "memory" or int(result.stdout) <= CONFIG.memory_mb << 20
    await session.run(["python3", "-c", "import os\nos.kill(-1, 9)"])


# ---- disk

FILL = "with open({path!r}, 'wb') as f:\n    for _ in range(10_240):\n        f.write(b'x' * (1 << 20))"


@pytest.mark.parametrize(("path", "most_mb"), [("/tmp/f", CONFIG.tmp_mb), ("/dev/shm/f", SHM_MB)])
async def test_ten_gigabytes_to_a_private_folder(session: Session, path: str, most_mb: int) -> None:
    result = await attack(session, FILL.format(path=path), timeout_s=30.0)
    assert result.stderr.endswith("OSError: [Errno 28] No space left on device\n")
    size = int((await session.run_python(f"import os\nprint(os.path.getsize({path!r}))")).stdout)
    assert size <= most_mb << 20


async def test_a_full_folder_refuses_a_file_and_says_why(session: Session) -> None:
    await attack(session, FILL.format(path="/tmp/f"), timeout_s=30.0)
    with pytest.raises(OSError, match="No space left"):
        await session.write_file("g", bytes(1 << 20))


async def test_a_million_files(session: Session) -> None:
    result = await attack(session, "for i in range(10**6): open(f'/tmp/{i}', 'w').close()", timeout_s=0.7)
    assert result.limit in ("wall", "memory") or result.stderr.endswith("No space left on device\n")


# ---- descriptors


async def test_every_descriptor_that_there_is(session: Session) -> None:
    code = "import os\nkept = []\nwhile True: kept.append(os.open('/dev/null', os.O_RDONLY))"
    result = await attack(session, code)
    assert (result.exit_code, result.limit) == (1, None)
    assert "OSError" in result.stderr  # its text needs descriptors too
    assert (await session.run(["echo", "room"])).stdout == "room\n"


async def test_descriptors_hidden_in_messages(session: Session) -> None:
    """A socket can hold descriptors that no process has open; without a limit the whole machine runs out."""
    code = """
import socket
for n in range(100_000):
    left, right = socket.socketpair()
    for _ in range(4): socket.send_fds(left, [b'x'], [0] * 250)
    socket.send_fds(left, [b'x'], [left.fileno(), right.fileno()])
    left.close()
    right.close()
"""
    result = await attack(session, code)
    assert (result.exit_code, result.limit) == (1, None)
    assert "OSError: [Errno 109] Too many references" in result.stderr


# ---- output


@pytest.mark.parametrize("stream", [1, 2])
async def test_ten_gigabytes_of_output(session: Session, stream: int) -> None:
    result = await attack(session, f"import os\nwhile True: os.write({stream}, b'y' * 65536)", timeout_s=30.0)
    assert ended_by(result, "output")
    assert len(result.stdout) + len(result.stderr) == CONFIG.output_bytes
    assert (await session.run(["yes"], timeout_s=30.0)).limit == "output"


async def test_a_daemon_that_writes_for_ever_does_not_hold_up_the_answer(session: Session) -> None:
    code = "import os\nif os.fork() == 0:\n    while True: os.write(1, b'y' * 65536)"
    result = await attack(session, code, timeout_s=30.0)
    assert result.exit_code == 0 or result.limit == "output"
    assert len(result.stdout) <= CONFIG.output_bytes
    await session.run(["python3", "-c", "import os, signal\nos.kill(-1, signal.SIGKILL)"])


# ---- time

IGNORE = "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
STOP = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
SLEEPS = ("while True: pass", "import time\ntime.sleep(1e9)", "import signal\nsignal.pause()", STOP)


@pytest.mark.parametrize("code", SLEEPS, ids=["loop", "sleep", "pause", "stopped"])
async def test_for_ever(session: Session, code: str) -> None:
    assert ended_by(await attack(session, IGNORE + code, timeout_s=0.3), "wall")
    result = await session.run(["python3", "-c", IGNORE + code], timeout_s=0.3)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", False)


async def test_more_processor_time_than_allowed(session: Session) -> None:
    assert ended_by(await attack(session, IGNORE + "while True: pass", timeout_s=60.0), "cpu")


HANGING_VALUE = "class Hanging:\n    def __repr__(self):\n        while True: pass\nHanging()"
HANGING_ERROR = "class Hanging(Exception):\n    def __str__(self):\n        while True: pass\nraise Hanging"


@pytest.mark.parametrize("code", [HANGING_VALUE, HANGING_ERROR], ids=["value", "exception"])
async def test_what_hangs_when_it_is_shown(session: Session, code: str) -> None:
    assert ended_by(await attack(session, code, timeout_s=0.5), "wall")
