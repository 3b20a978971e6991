"""Watching one run: bytes in, bytes out, and its end, by itself or by a limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside.capture import Capture
from penstock.sandbox.inside.children import Child
from penstock.sandbox.inside.interpreter import OUTCOME_BYTES
from penstock.sandbox.inside.processes import Processes

LONGEST_WAIT_S = 3600.0
"""poll() counts milliseconds in 31 bits."""
Handlers = dict[int, Callable[[], bool]]
"""Descriptor → what to do when it is ready; False: stop watching it."""


class Run:
    """A command, fed its stdin, or a call of a resident, fed its code."""

    def __init__(self, child: Child, capture: Capture, feed_fd: int, feed: bytes) -> None:
        self.child = child
        self.capture = capture
        self.feed_fd = feed_fd
        self.feed = feed
        self.number = 0
        """Which call of a resident; 0 for a command."""
        self.outcomes = -1
        """Where the resident says that a call ended."""
        self.exit_code: int | None = None
        """Set once the resident said so; for all else the kernel's word counts."""

    def expect_outcome(self, number: int, outcomes: int) -> None:
        """Of a resident's call `number`; drops what earlier calls left in the pipe."""
        self.number, self.outcomes = number, outcomes
        with contextlib.suppress(BlockingIOError):
            while os.read(outcomes, 65536):
                continue

    def feed_more(self) -> bool:
        """False once all is written (or nobody reads it)."""
        try:
            self.feed = self.feed[os.write(self.feed_fd, self.feed) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.feed = b""
        if not self.feed:
            self.end_feed()
        return bool(self.feed)

    def end_feed(self) -> None:
        """A command's stdin ends with its text; a resident's pipe stays for the next call."""
        if self.number == 0 and self.feed_fd >= 0:
            os.close(self.feed_fd)
            self.feed_fd = -1

    def note_outcome(self) -> bool:
        data = os.read(self.outcomes, OUTCOME_BYTES)
        if len(data) == OUTCOME_BYTES and data.isdigit() and int(data[:10]) == self.number:
            self.exit_code = int(data[10:])  # any other number: a thread of an earlier call still speaks
        return bool(data)

    def drain(self) -> None:
        """What is in the pipes already; a daemon that holds them open is not waited for."""
        for read, fd in ((self.capture.read_stdout, self.child.stdout), (self.capture.read_stderr, self.child.stderr)):
            while not self.capture.flooded and read(fd):
                continue
        self.capture.finish()


def pump(run: Run, deadline: float, processes: Processes, interrupts: Handlers) -> str | None:
    """Move bytes until the run ends; returns the limit that it broke, if any. Raises what `interrupts` raise."""
    poller, handlers = select.poll(), _handlers(run, interrupts)
    for fd in handlers:
        poller.register(fd, select.POLLOUT if fd == run.feed_fd else select.POLLIN)
    while run.exit_code is None and run.child.pid not in processes.exits:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return "wall"
        for fd, _ in poller.poll(min(remaining_s, LONGEST_WAIT_S) * 1000 + 1):
            if not handlers[fd]():
                poller.unregister(fd)
        if run.capture.flooded:
            return "output"
    return None


def _handlers(run: Run, interrupts: Handlers) -> Handlers:
    os.set_blocking(run.feed_fd, False)
    handlers = {
        run.child.stdout: lambda: run.capture.read_stdout(run.child.stdout),
        run.child.stderr: lambda: run.capture.read_stderr(run.child.stderr),
        run.feed_fd: run.feed_more,
        **interrupts,
    }
    if run.number:
        handlers[run.outcomes] = run.note_outcome
    return handlers


def verdict(run: Run, processes: Processes, broken: str | None) -> dict[str, Any]:
    """``exit_code`` (None where a limit killed it) and ``limit`` (that ended or cut it)."""
    if broken is not None:
        return {"exit_code": None, "limit": broken}
    cut = "output" if run.capture.cut else None
    if run.exit_code is not None:
        return {"exit_code": run.exit_code, "limit": cut}
    status, cpu_s = processes.exits[run.child.pid]
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= processes.settings["cpu_s"]):
        return {"exit_code": None, "limit": "cpu"}
    return {"exit_code": code, "limit": cut}
