"""Stacks on request, from real processes: those that answer, and those that the signal would end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.until import until_in_threads

from penstock.common import ProcessTable
from penstock.deploy.run.stacks import ask_for_stacks, is_suspended, task_lines

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
            argv = [sys.executable, "-c", code, *words]
            self.pid = subprocess.Popen(argv, stdout=file, stderr=file, start_new_session=True).pid

    def until(self, text: str, times: int = 1) -> str:
        until_in_threads(lambda: self.log.read_text().count(text) >= times)
        return self.log.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, *words: str) -> Child:
        children.append(Child(tmp_path / "role.log", code, *words))
        return children[-1]

    yield start
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def test_threads_and_tasks_are_written_and_nobody_is_ended(start: Callable[..., Child]) -> None:
    role = start(ANSWERS, "penstock.deploy.cli")
    below = int(role.until("up ").split()[1])
    for times in (1, 2):
        assert ask_for_stacks([role.pid]) == [role.pid], "not the one below it"
        text = role.until("3 task(s), such as walker", times)
    assert text.index("in go_home") < text.index("in wait_for_a_bus"), "from the outermost call inwards"
    assert "in read_a_book" in text, "threads, too"
    assert below in ProcessTable.now().tree_of(role.pid), "a process that does not answer lives on"
    assert not is_suspended(ProcessTable.now(), role.pid)
    assert ProcessTable.now().cpu_s(role.pid) > 0
    os.kill(role.pid, signal.SIGSTOP)
    until_in_threads(lambda: is_suspended(ProcessTable.now(), role.pid))


def test_a_process_between_fork_and_exec_is_not_asked(start: Callable[..., Child]) -> None:
    """It has its parent's handlers and command line; the signal would end the program that it becomes."""
    # A fork that lives on stands for the moment before exec.
    fork = "\n    if not os.fork():\n        time.sleep(60)\n    tasks = ["
    role = start(ANSWERS.replace("\n    tasks = [", fork).replace("sys,", "sys, os, time,"), "penstock.deploy.cli")
    role.until("up ")
    assert len(ProcessTable.now().tree_of(role.pid)) == 3
    assert ask_for_stacks([role.pid]) == [role.pid]


def test_a_program_of_others_is_not_asked(start: Callable[..., Child]) -> None:
    """It catches the signal for a purpose of its own, or would be ended by it."""
    handler = "signal.signal(signal.SIGUSR1, lambda *_: print('asked'))"
    other = start(f"import signal, time; {handler}; print('up', flush=True); time.sleep(60)")
    other.until("up")
    assert ask_for_stacks([other.pid]) == []


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
