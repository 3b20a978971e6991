"""Processes end with their parent, their owner or their group; real ones."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from penstock.common import guard
from penstock.common.process import (
    ProcessTable,
    command_line,
    describe_exit,
    guard_command,
    handles_signal,
    kill_group,
    raise_open_files,
    uncollected,
)

SHARED_MEMORY = Path(guard.SHARED_MEMORY)
FAMILY = "sleep 300 & echo $!; sleep 300 & echo $!; wait"


def running(pid: int) -> bool:
    """Returns True if the process exists and is not a zombie."""
    return ProcessTable.now().fields.get(pid, "Z")[0] not in ("Z", "X")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in a session of its own; what is left of it is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True))
        return started[-1]

    yield begin
    for process in started:
        kill_group(process.pid)
        process.communicate(timeout=60)


def read_pids(process: subprocess.Popen[str], count: int = 2) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


# guard -------------------------------------------------------------------------------------------------------------
def test_imports_are_not_collected_and_no_later_collection_looks_at_them() -> None:
    kept: list[dict[str, int]] = []

    @uncollected()
    def fails_half_way() -> None:
        assert not gc.isenabled()
        kept.extend({} for _ in range(1000))
        raise ImportError

    gc.unfreeze()
    try:
        with pytest.raises(ImportError):
            fails_half_way()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(kept)
    finally:
        gc.unfreeze()


def test_guard_ends_the_group_when_the_pipe_closes(start) -> None:
    process = start(guard_command(["sh", "-c", FAMILY]))
    pids = read_pids(process)
    assert all(map(running, pids))
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert not any(map(running, pids))
    process.stdin = None


def test_guard_kills_after_the_grace_what_ignores_sigterm(start) -> None:
    process = start(guard_command(["sh", "-c", "trap '' TERM; sleep 300 & echo $!; echo $$; wait; sleep 300"]))
    pids = read_pids(process)
    process.stdin.close()
    process.wait(timeout=60)
    process.stdin = None
    assert wait_until(lambda: not any(map(running, pids)))


def test_guard_passes_the_exit_status_on(start) -> None:
    process = start(guard_command(["sh", "-c", "sleep 300 & echo $!; exit 7"]))
    (left,) = read_pids(process, 1)
    assert process.wait(timeout=60) == 7
    assert wait_until(lambda: not running(left))


@pytest.mark.crash
def test_guard_killed_ends_the_command(start) -> None:
    process = start(guard_command(["sh", "-c", "echo $$; exec sleep 300"]))
    (command,) = read_pids(process, 1)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not running(command))


@pytest.mark.crash
def test_guard_ends_the_group_when_the_owner_is_killed(start) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)"
    owner = start([sys.executable, "-c", f"{code}; time.sleep(300)", *guard_command(["sh", "-c", FAMILY])])
    pids = read_pids(owner)
    owner.kill()
    assert wait_until(lambda: not any(map(running, pids)))


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    """A segment that this process and the command map."""
    segment = SharedMemory(create=True, size=1024)
    yield segment
    segment.close()
    segment.unlink()


@pytest.mark.crash
def test_guard_removes_orphaned_shared_memory_alone(start, shared: SharedMemory) -> None:
    process = start(guard_command([sys.executable, "-c", SEGMENTS, shared.name]))
    made = process.stdout.readline().split()
    assert all((SHARED_MEMORY / name).exists() for name in made)
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdin = None
    assert [name for name in (*made, shared.name) if (SHARED_MEMORY / name).exists()] == [shared.name]


@pytest.mark.crash
def test_segments_are_known_after_their_process_was_killed(shared: SharedMemory) -> None:
    pipe = subprocess.PIPE  # a member of this process's own group
    with subprocess.Popen([sys.executable, "-c", SEGMENTS, shared.name], stdout=pipe, text=True) as process:
        assert process.stdout is not None
        made = process.stdout.readline().split()
        segments = guard.Segments()
        segments.look()
        process.kill()
    assert all((SHARED_MEMORY / name).exists() for name in made)
    segments.remove()
    assert [name for name in (*made, shared.name) if (SHARED_MEMORY / name).exists()] == [shared.name]


SEGMENTS = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *_: None  # an end by a signal leaves everything behind
shared, made = SharedMemory(sys.argv[1]), SharedMemory(create=True, size=1024)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(made.name, "sem." + semaphore._semlock.name[1:], flush=True)
time.sleep(300)
"""


# parents, groups, trees --------------------------------------------------------------------------------------------
@pytest.mark.crash
def test_die_with_parent(start) -> None:
    child = "from penstock.common.process import die_with_parent; die_with_parent()"
    child += "; import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(300)"
    parent = start([sys.executable, "-c", code])
    (pid,) = read_pids(parent, 1)
    assert running(pid)
    parent.kill()
    assert wait_until(lambda: not running(pid))


@pytest.mark.crash
def test_die_with_parent_that_was_killed_before_the_call_ends_the_process(start) -> None:
    child = "import os; print(os.getpid(), flush=True); input()  # as long as Python loads what the process needs\n"
    child += "from penstock.common.process import die_with_parent; die_with_parent(); print('lives')"
    code = "import os, subprocess, sys, time; "
    code += "environment = {**os.environ, 'PENSTOCK_PARENT': str(os.getpid())}; "
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}], env=environment); time.sleep(300)"
    parent = start([sys.executable, "-c", code])
    (pid,) = read_pids(parent, 1)
    parent.kill()
    parent.wait()
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.read() == ""
    assert wait_until(lambda: not running(pid))


def test_tree_and_group_of_a_command(start) -> None:
    process = start(["sh", "-c", FAMILY])
    pids = read_pids(process)
    table = ProcessTable.now()
    assert table.tree_of(process.pid)[0] == process.pid
    assert set(table.tree_of(process.pid)) == {process.pid, *pids}
    assert table.cpu_s(process.pid) >= 0
    os.kill(pids[0], signal.SIGSTOP)
    assert wait_until(lambda: ProcessTable.now().stopped(process.pid) == [pids[0]])
    kill_group(process.pid)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert wait_until(lambda: not any(map(running, pids)))
    kill_group(process.pid)  # gone: ignored
    kill_group(None)


def test_kill_group_ends_orphans_too(start) -> None:
    process = start(["sh", "-c", "sleep 300 & echo $!; exit 0"])
    (left,) = read_pids(process, 1)
    process.wait(timeout=60)
    assert running(left)
    kill_group(process.pid)
    assert wait_until(lambda: not running(left))


def test_handles_signal_and_command_line() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert handles_signal(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert not handles_signal(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert b"python" in command_line(os.getpid())
    assert (handles_signal(1 << 30, 10), command_line(1 << 30)) == (False, b"")


@pytest.mark.parametrize(
    ("status", "words"),
    [(-9, "signal 9"), (137, "signal 9"), (-15, "SIGTERM"), (143, "SIGTERM"), (3, "status 3"), (0, "status 0")],
)
def test_describe_exit(status: int, words: str) -> None:
    assert words in describe_exit(status)


def test_raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (65536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
