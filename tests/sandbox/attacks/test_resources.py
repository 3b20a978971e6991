"""More than its share: processes, disk, descriptors, output."""

from __future__ import annotations

import asyncio

import pytest
from tests.sandbox.attacks.targets import CONFIG, SHM_MB, Target, attack, ended_by
from tests.sandbox.backends import on_every_backend

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


# ---- processes

FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
COUNT = "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])"


@on_every_backend
async def test_attack_fork_bomb(session: Session, target: Target) -> None:
    before = int((await session.run_python(COUNT)).stdout)
    result, _ = await asyncio.gather(attack(session, FORK_BOMB, timeout_s=0.7), target.visit_neighbour())
    assert ended_by(result, "wall")
    assert int((await session.run_python(COUNT)).stdout) == before


async def test_attack_fork_bomb_as_a_command_spares_the_interpreter(session: Session) -> None:
    await session.run_python("kept = 1")
    result = await session.run(["sh", "-c", "f() { f | f & }; f; sleep 60"], timeout_s=0.7)
    # a shell that cannot fork may give up by itself before its time is over
    assert (result.exit_code, result.limit) in ((None, "wall"), (2, None), (254, None))
    assert result.state_lost or (await session.run_python("kept")).stdout == "1\n"


async def test_attack_fork_bomb_of_threads(session: Session) -> None:
    code = """
import threading, time
for n in range(10_000):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
    result = await attack(session, code)
    assert result.exit_code == 1
    assert result.stderr.endswith("RuntimeError: can't start new thread\n")


async def test_attack_box_full_of_processes_still_runs_commands(session: Session) -> None:
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


# ---- disk

FILL = "with open({path!r}, 'wb') as f:\n    for _ in range(10_240):\n        f.write(b'x' * (1 << 20))"


@pytest.mark.parametrize(("path", "most_mb"), [("/tmp/f", CONFIG.tmp_mb), ("/dev/shm/f", SHM_MB)])
async def test_attack_ten_gigabytes_to_a_private_folder(session: Session, path: str, most_mb: int) -> None:
    result = await attack(session, FILL.format(path=path), timeout_s=30.0)
    assert result.stderr.endswith("OSError: [Errno 28] No space left on device\n")
    size = int((await session.run_python(f"import os\nprint(os.path.getsize({path!r}))")).stdout)
    assert size <= most_mb << 20


async def test_attack_full_folder_refuses_a_file_and_says_why(session: Session) -> None:
    await attack(session, FILL.format(path="/tmp/f"), timeout_s=30.0)
    with pytest.raises(OSError, match="No space left"):
        await session.write_file("g", bytes(1 << 20))


async def test_attack_million_files(session: Session) -> None:
    result = await attack(session, "for i in range(10**6): open(f'/tmp/{i}', 'w').close()", timeout_s=0.7)
    assert result.limit in ("wall", "memory") or result.stderr.endswith("No space left on device\n")


# ---- descriptors


async def test_attack_every_descriptor_that_there_is(session: Session) -> None:
    code = "import os\nkept = []\nwhile True: kept.append(os.open('/dev/null', os.O_RDONLY))"
    result = await attack(session, code)
    assert (result.exit_code, result.limit) == (1, None)
    assert "OSError" in result.stderr  # its text needs descriptors too
    assert (await session.run(["echo", "room"])).stdout == "room\n"


async def test_attack_descriptors_hidden_in_messages(session: Session) -> None:
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
async def test_attack_ten_gigabytes_of_output(session: Session, stream: int) -> None:
    result = await attack(session, f"import os\nwhile True: os.write({stream}, b'y' * 65536)", timeout_s=30.0)
    assert ended_by(result, "output")
    assert len(result.stdout) + len(result.stderr) == CONFIG.output_bytes
    assert (await session.run(["yes"], timeout_s=30.0)).limit == "output"


async def test_attack_ten_gigabytes_of_a_streamed_run(session: Session) -> None:
    pieces = [piece async for piece in session.stream(["yes", "\U0001f600"], timeout_s=30.0)]
    result = pieces[-1].result
    assert result is not None
    assert (result.exit_code, result.limit) == (None, "output")
    assert sum(len(piece.data.encode()) for piece in pieces) <= CONFIG.output_bytes + 4
    assert set("".join(piece.data for piece in pieces)) <= {"\U0001f600", "\n", "\ufffd"}


async def test_attack_endless_writer_does_not_delay_the_result(session: Session) -> None:
    code = "import os\nif os.fork() == 0:\n    while True: os.write(1, b'y' * 65536)"
    result = await attack(session, code, timeout_s=30.0)
    assert result.exit_code == 0 or result.limit == "output"
    assert len(result.stdout) <= CONFIG.output_bytes
    await session.run(["python3", "-c", "import os\nos.kill(-1, 9)"])
    await session.run_python("its own end, if the kernel was not done with it before")
