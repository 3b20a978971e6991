"""Stacks on request: SIGUSR1 writes what a role is doing into its log.

    SIGUSR1 ──► faulthandler, in C: the Python stack of every thread, even if the process hangs
            └─► the event loop, if it still runs: what each asyncio task awaits, call by call

A suspended task is on no thread's stack: without the second part a worker with a thousand stuck episodes would show one
idle loop. `ask_for_stacks` signals a tree of processes (from /proc, Linux only).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from penstock.common import ProcessTable
from penstock.common.process import command_line, handles_signal

STDERR = 2
MOST_STACKS = 40
"""Different ones that are written; tasks with the same are counted."""


def answer_with_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Write stacks to stderr at SIGUSR1. Called in the main thread, once per process."""

    def write_tasks() -> None:
        lines = task_lines(asyncio.all_tasks(loop))
        text = "\n".join(["Tasks, each from the outermost call to what it awaits:", *lines, ""])
        os.write(STDERR, text.encode())

    loop.add_signal_handler(signal.SIGUSR1, write_tasks)
    # Registered last: faulthandler calls the handler that was there before, which wakes the loop.
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True, chain=True)


def task_lines(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Tasks with the same stack together, the most frequent first."""
    names: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for task in tasks:
        names[tuple(map(_line_of, _frames(task.get_coro())))].append(task.get_name())
    stacks = sorted(names.items(), key=lambda item: -len(item[1]))
    lines = []
    for stack, named in stacks[:MOST_STACKS]:
        lines += [f"{len(named)} task(s), such as {named[0]}:", *stack]
    left_out = stacks[MOST_STACKS:]
    return lines + ([f"and {len(left_out)} other stacks"] if left_out else [])


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine and of what it awaits, up to a future or socket."""
    while awaited is not None:
        frames, awaits = (
            [value for name in names if (value := getattr(awaited, name, None)) is not None]
            for names in (("cr_frame", "gi_frame", "ag_frame"), ("cr_await", "gi_yieldfrom", "ag_await"))
        )
        if not frames:
            return
        yield frames[0]
        awaited = awaits[0] if awaits else None


def _line_of(frame: FrameType) -> str:
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}'


OURS = b"penstock.deploy.cli"


def ask_for_stacks(roots: Iterable[int]) -> list[int]:
    """Sends SIGUSR1 to every role of ours in these process trees, including a trainer's ranks; returns their pids.

    Only processes with a handler get it: the signal would end engines, boxes and torchrun itself. A process between
    fork and exec has its parent's handlers and command line, and is about to lose them.
    """
    table = ProcessTable.now()
    trees = (pid for root in roots for pid in table.tree_of(root))
    pids = [
        pid
        for pid in trees
        if handles_signal(pid, signal.SIGUSR1)
        and _is_ours(pid)
        and command_line(pid) != command_line(table.parent_of(pid))
    ]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return pids


def is_suspended(table: ProcessTable, root: int) -> bool:
    """Return True if SIGSTOP or a debugger holds a role of ours in the tree. Processes of boxes do not count."""
    return any(_is_ours(pid) for pid in table.stopped(root))


def _is_ours(pid: int) -> bool:
    return OURS in command_line(pid)
