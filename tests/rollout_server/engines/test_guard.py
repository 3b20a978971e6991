"""The guard ends everything when its owner is gone, however it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from tests.rollout_server.conftest import running

from penstock.rollout_server.engines import guard

SHARED_MEMORY = Path(guard.SHARED_MEMORY)
FAMILY = "sleep 300 & echo $!; sleep 300 & echo $!; wait"


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", guard.__file__, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_pids(process: subprocess.Popen[str], count: int = 2) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_closed_pipe_ends_the_whole_group() -> None:
    process = start(FAMILY)
    pids = read_pids(process)
    assert all(running(pid) for pid in pids)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert not any(running(pid) for pid in pids)


def test_a_command_that_ignores_the_signal_is_killed_after_the_grace() -> None:
    process = start("trap '' TERM; sleep 300 & echo $!; echo $$; wait; sleep 300")
    pids = read_pids(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=60)
    assert wait_until(lambda: not any(running(pid) for pid in pids))


def test_the_exit_status_is_handed_on_and_children_left_behind_are_ended() -> None:
    process = start("sleep 300 & echo $!; exit 7")
    (left,) = read_pids(process, 1)
    assert process.wait(timeout=60) == 7
    assert wait_until(lambda: not running(left))


@pytest.mark.crash
def test_killing_the_guard_itself_ends_the_command() -> None:
    process = start("echo $$; exec sleep 300")
    (command,) = read_pids(process, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert wait_until(lambda: not running(command))


@pytest.mark.crash
def test_killing_the_owner_ends_everything() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, guard.__file__, FAMILY], stdout=subprocess.PIPE, text=True)
    pids = read_pids(owner)
    assert all(running(pid) for pid in pids)
    owner.kill()
    owner.wait(timeout=60)
    assert wait_until(lambda: not any(running(pid) for pid in pids))


@pytest.mark.crash
def test_shared_memory_of_a_killed_group_is_removed_but_not_what_another_process_has_mapped(
    ours: SharedMemory,
) -> None:
    process = start(f"exec {sys.executable} -c '{SEGMENTS}' {ours.name}")
    assert process.stdout is not None
    assert process.stdin is not None
    made = process.stdout.readline().split()
    assert all(SHARED_MEMORY.joinpath(name).exists() for name in made)
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert [name for name in (*made, ours.name) if SHARED_MEMORY.joinpath(name).exists()] == [ours.name]


@pytest.mark.crash
def test_what_a_process_had_mapped_is_known_after_it_was_killed(ours: SharedMemory) -> None:
    process = subprocess.Popen([sys.executable, "-c", SEGMENTS, ours.name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = process.stdout.readline().split()
    segments = guard.Segments()
    segments.look()
    process.kill()
    process.wait(timeout=60)
    assert all(SHARED_MEMORY.joinpath(name).exists() for name in made)
    segments.remove()
    assert [name for name in (*made, ours.name) if SHARED_MEMORY.joinpath(name).exists()] == [ours.name]


@pytest.fixture
def ours() -> Iterator[SharedMemory]:
    """A segment that this process and the group share."""
    segment = SharedMemory(create=True, size=1024)
    yield segment
    segment.close()
    segment.unlink()


SEGMENTS = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *_: None  # an end by a signal leaves everything, as one of the tracker does
shared, made = SharedMemory(sys.argv[1]), SharedMemory(create=True, size=1024)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(made.name, "sem." + semaphore._semlock.name[1:], flush=True)
time.sleep(300)  # until it is killed, which is what the tests are about
"""

OWNER = """
import subprocess, sys, time
command = [sys.executable, "-I", sys.argv[1], "sh", "-c", sys.argv[2]]
subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(300)  # until it is killed
"""
