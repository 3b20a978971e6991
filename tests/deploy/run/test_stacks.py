"""Stacks on request, from real processes: those that answer, and those that the signal would end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.common import ProcessTable
from penstock.deploy.run.stacks import ask_for_stacks, is_held, task_lines

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
ANSWERS = """
import asyncio, subprocess, sys, threading, uvloop
from penstock.deploy.run.stacks import answer_with_stacks

async def wait_for_a_bus():
    await asyncio.Event().wait()

async def go_home():
    await wait_for_a_bus()

def read_a_book():
    threading.Event().wait()

async def main():
    threading.Thread(target=read_a_book, daemon=True).start()
    answer_with_stacks(asyncio.get_running_loop())
    tasks = [asyncio.create_task(go_home(), name=f"walker {i}") for i in range(3)]
    await asyncio.sleep(0)  # each waits now: none is on the thread's own stack, which is written the other way round
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("up", child.pid, flush=True)
    await asyncio.gather(*tasks)

asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""


class Child:
    def __init__(self, log: Path, code: str, *words: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *words], stdout=file, stderr=file, start_new_session=True
            )

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        while text not in (said := self.log.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        return said


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path / "role.log", ANSWERS, "penstock.deploy.cli")
    yield child
    os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def test_threads_and_tasks_are_written_and_nobody_is_ended(answering: Child) -> None:
    below = int(answering.until("up ").split()[1])
    for times in (1, 2):
        assert ask_for_stacks([answering.process.pid]) == [answering.process.pid], "not the one below it"
        while (said := answering.log.read_text()).count("3 task(s), such as walker") < times:
            answering.until("3 task(s), such as walker")
    assert said.index("in go_home") < said.index("in wait_for_a_bus"), "from the outermost call inwards"
    assert "in read_a_book" in said, "threads, too"
    assert below in ProcessTable.now().tree_of(answering.process.pid), "a process that does not answer lives on"


def test_a_program_of_others_is_not_asked(tmp_path: Path) -> None:
    """It catches the signal for a purpose of its own, or would be ended by it."""
    handler = "signal.signal(signal.SIGUSR1, lambda *_: print('asked'))"
    code = f"import signal, time; {handler}; print('up', flush=True); time.sleep(60)"
    other = Child(tmp_path / "other.log", code)
    try:
        other.until("up")
        assert ask_for_stacks([other.process.pid]) == []
    finally:
        other.process.kill()
        other.process.wait()


def test_a_role_that_is_stopped_is_seen_and_its_cpu_counted(answering: Child) -> None:
    answering.until("up ")
    pid = answering.process.pid
    assert not is_held(ProcessTable.now(), pid)
    assert ProcessTable.now().cpu_s(pid) > 0
    os.kill(pid, signal.SIGSTOP)
    while not is_held(ProcessTable.now(), pid):
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)


async def test_tasks_with_the_same_stack_are_counted_together() -> None:
    async def waits(future: asyncio.Future[None]) -> None:
        await future

    futures = [asyncio.get_running_loop().create_future() for _ in range(4)]
    tasks = [asyncio.create_task(waits(future), name=f"t{i}") for i, future in enumerate(futures)]
    await asyncio.sleep(0)
    lines = task_lines(tasks)
    assert lines[0].startswith("4 task(s), such as t")
    assert lines[1].endswith("in test_tasks_with_the_same_stack_are_counted_together.<locals>.waits")
    for future in futures:
        future.set_result(None)
    await asyncio.gather(*tasks)
