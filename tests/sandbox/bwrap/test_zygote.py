"""Boxes that are forks of one process: nothing passes from one to the next, and none outlives what it descends from."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.sandbox.conftest import CONFIG, OWNER, box_cgroups
from tests.sandbox.orphans import Maker, zygote_processes
from tests.until import until

from penstock.sandbox import SandboxError, SandboxLost, Session
from penstock.sandbox.bwrap.sandbox import BwrapSandbox

pytestmark = pytest.mark.bwrap
DEADLINE_S = 60.0


def processes() -> list[int]:
    """The zygote, its bubblewrap and the drivers of this very process, oldest first."""
    return zygote_processes([Maker(os.getpid(), OWNER)])


def zygote() -> int:
    """The one with a bubblewrap for its parent."""
    (found,) = [pid for pid in processes() if parent_name(pid) == "bwrap"]
    return found


def parent_name(pid: int) -> str:
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/comm").read_text().strip()


async def printed(session: Session, code: str) -> str:
    result = await session.run_python(code)
    assert result.exit_code == 0, result.stderr
    return result.stdout


LEAVE = """
import builtins, ctypes, os, subprocess, sys, json
for path in ('/tmp/left', '/dev/shm/left'):
    open(path, 'w').write('left')
os.environ['LEFT'] = 'left'
os.putenv('LEFT', 'left')
builtins.left = json.left = sys.left = 'left'
os.chdir('/dev/shm')
os.umask(0o777)
os.nice(3)
kept = [os.open('/tmp/left', os.O_RDONLY) for _ in range(20)]
libc = ctypes.CDLL(None)
print(libc.shmget(1234, 4096, 0o1666) >= 0, libc.msgget(1234, 0o1666) >= 0, libc.semget(1234, 1, 0o1666) >= 0)
subprocess.Popen(['setsid', 'sleep', '1000'])
"""
LOOK = """
import builtins, ctypes, json, os, sys
libc = ctypes.CDLL(None)
print(os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir('/dev/pts'))
print(os.environ.get('LEFT'), hasattr(builtins, 'left'), hasattr(json, 'left'), hasattr(sys, 'left'))
print(os.getcwd(), oct(os.umask(0o22)), sorted(os.listdir('/proc/self/fd')))
print(libc.shmget(1234, 4096, 0), libc.msgget(1234, 0), libc.semget(1234, 1, 0))
print([int(pid) for pid in os.listdir('/proc') if pid.isdigit()])
print(open('/proc/self/environ').read().count('left'), os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.parametrize("leaver_lives", [True, False])
async def test_zygote_nothing_passes_from_box_to_box(sandbox: BwrapSandbox, leaver_lives: bool) -> None:
    """The box after one that left something is as one before it, whether the leaver still lives or not."""
    first = await sandbox.start("before")
    expected = await printed(first, LOOK)
    await first.close()
    leaver = await sandbox.start("leaver")
    assert "True" in await printed(leaver, LEAVE) or not box_cgroups(OWNER)  # without cgroups all three are refused
    if not leaver_lives:
        await leaver.close()
    after = await sandbox.start("after")
    assert await printed(after, LOOK) == expected
    assert "sleep" not in (await after.run(["ps", "-eo", "comm"])).stdout


async def test_zygote_boxes_draw_different_random_numbers(sandbox: BwrapSandbox) -> None:
    code = "import os, random, tempfile, uuid\nprint(random.random(), tempfile.mktemp(), uuid.uuid4(), os.urandom(8))"
    drawn = [word for _ in range(3) for word in (await printed(await sandbox.start("draws"), code)).split()]
    assert len(set(drawn)) == len(drawn)


async def test_zygote_boxes_share_no_namespace(sandbox: BwrapSandbox) -> None:
    code = "import os\nprint({os.readlink(f'/proc/self/ns/{k}') for k in 'user mnt pid net ipc uts cgroup'.split()})"
    seen = [eval(await printed(await sandbox.start("looks"), code)) for _ in range(2)]
    own = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")}
    assert not seen[0] & seen[1]
    assert not seen[0] & own
    assert len(seen[0]) == 7


async def test_zygote_is_out_of_a_boxes_sight(sandbox: BwrapSandbox) -> None:
    """No process but the box's own, no capability, nothing of the machine's /proc."""
    session = await sandbox.start("looks")
    code = """
import os
status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
print({status[name].strip('\\t0') for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')})
print(status['NoNewPrivs'].strip(), status['Seccomp'].strip(), status['Groups'].split() in ([], [str(os.getgid())]))
print([os.readlink(f'/proc/self/fd/{fd}').split(':')[0] for fd in '012'])
paths = [f'{root}/{file}' for root, _, files in os.walk('/proc/sys') for file in files]
print([path for path in paths if os.access(path, os.W_OK)])
try: print(open('/proc/sys/kernel/ns_last_pid', 'w').write('9'))
except OSError as error: print(error.errno)
"""
    lines = (await printed(session, code)).splitlines()
    assert lines[0] == "{''}"
    assert lines[1].startswith("1 2 ")
    assert lines[1].endswith("True") or os.geteuid() != 0
    assert lines[2] == "['/dev/null', 'pipe', 'pipe']"
    assert lines[3] in ("[]", "['/proc/sys/kernel/ns_last_pid']")  # which the kernel lets all open, and none write
    assert lines[4] in (str(errno.EPERM), str(errno.EACCES))


async def test_zygote_memory_of_one_box_is_not_charged_to_the_next(sandbox: BwrapSandbox) -> None:
    """Each box has a whole `memory_mb`, though the one before it ran out."""
    for _ in range(2):
        session = await sandbox.start("fills")
        most = (CONFIG.memory_mb - 64) << 20
        assert await printed(session, f"kept = b'x' * {most}\nprint(len(kept))") == f"{most}\n"
        assert (await session.run_python("more = bytes([1]) * (1 << 30)")).exit_code != 0
        await session.close()


async def test_zygote_waits_for_its_drivers_however_they_end(sandbox: BwrapSandbox) -> None:
    """None stays a zombie, which would be a process of its user; an interpreter's CPU is in the zygote's account."""
    first, *others = [await sandbox.start(str(number)) for number in range(3)]
    before = psutil.Process(zygote()).cpu_times()
    assert (await first.run_python("import time\nwhile time.process_time() < 0.3: pass")).exit_code == 0
    await first.close()
    os.kill(max(driver.pid for driver in psutil.Process(zygote()).children()), signal.SIGKILL)
    await asyncio.gather(*(session.close() for session in others))
    await until(lambda: not psutil.Process(zygote()).children())
    after = psutil.Process(zygote()).cpu_times()
    assert after.children_user + after.children_system - before.children_user - before.children_system >= 0.29


async def test_zygote_killed_ends_every_box_and_the_next_starts(sandbox: BwrapSandbox) -> None:
    sessions = [await sandbox.start(str(number)) for number in range(2)]
    await asyncio.gather(*(session.run(["sh", "-c", "setsid sleep 1000 &"]) for session in sessions))
    call = asyncio.create_task(sessions[0].run_python("while True: pass", timeout_s=600.0))
    await asyncio.sleep(0.2)
    before = set(processes())
    assert len(before) >= 3
    os.kill(zygote(), signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await sessions[1].run(["true"])
    await until(lambda: not before & set(processes()))
    assert await printed(await sandbox.start("next"), "40 + 2") == "42\n"
    assert len(box_cgroups(OWNER)) in (0, 3, 1)


async def test_zygote_that_does_not_answer_leaves_no_box(
    sandbox: BwrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it forks once it answers again ends by itself: its control socket is closed, its group gone."""
    await (await sandbox.start("first")).close()
    groups = len(box_cgroups(OWNER))
    stopped = zygote()
    monkeypatch.setattr("penstock.sandbox.bwrap.zygote.START_DEADLINE_S", 1.0)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(SandboxError, match="does not answer"):
            await sandbox.start("late")
        start = asyncio.create_task(sandbox.start("given up"))
        await asyncio.sleep(0.2)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    finally:
        os.kill(stopped, signal.SIGCONT)
    monkeypatch.undo()
    session = await sandbox.start("next")
    assert await printed(session, "40 + 2") == "42\n"
    await session.close()
    await until(lambda: len(processes()) == 2)  # the zygote and its bubblewrap
    assert len(box_cgroups(OWNER)) == groups


async def test_zygote_that_cannot_be_had_leaves_bwrap_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.sandbox.bwrap.sandbox.why_no_zygote", lambda *_: "a test says so")
    with caplog.at_level(logging.INFO):
        sandbox = BwrapSandbox(CONFIG, OWNER)
    assert "a test says so" in caplog.text
    session = await sandbox.start("by itself")
    assert await printed(session, "40 + 2") == "42\n"
    assert not processes()
    await sandbox.close()
