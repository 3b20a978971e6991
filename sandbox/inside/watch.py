"""Watching one run: bytes in, bytes out, and its end, by itself or by a limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import interpreter
from penstock.sandbox.inside.capture import Capture
from penstock.sandbox.inside.children import Child
from penstock.sandbox.inside.processes import Processes


class Hangup(Exception):
    """The worker is gone."""


class Run:
    """A command, fed its stdin, or a call of the interpreter, fed its code."""

    def __init__(self, child: Child, output_bytes: int, feed_fd: int, feed: bytes) -> None:
        self.child = child
        self.capture = Capture(output_bytes)
        self.feed_fd = feed_fd
        self.feed = feed
        self.number = 0
        """Which call of the interpreter; 0 for a command."""
        self.outcomes = -1
        """Where the interpreter says that a call ended."""
        self.exit_code: int | None = None
        """Set once the interpreter said so; for all else the kernel's word counts."""

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
        """A command's stdin ends with its text; the interpreter's pipe stays for the next call."""
        if self.number == 0 and self.feed_fd >= 0:
            os.close(self.feed_fd)
            self.feed_fd = -1

    def drop_old_outcomes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.outcomes, 65536):
                continue

    def note_outcome(self) -> bool:
        data = os.read(self.outcomes, interpreter.OUTCOME.size)
        if len(data) == interpreter.OUTCOME.size:
            number, exit_code = interpreter.OUTCOME.unpack(data)
            if number == self.number:  # a thread of an earlier call may still speak
                self.exit_code = exit_code
        return bool(data)

    def drain(self) -> None:
        """What is in the pipes already; a daemon that holds them open is not waited for."""
        for read, fd in ((self.capture.read_stdout, self.child.stdout), (self.capture.read_stderr, self.child.stderr)):
            while not self.capture.flooded and read(fd):
                continue


def pump(run: Run, deadline: float, processes: Processes, control: int) -> str | None:
    """Move bytes until the run ends; returns the limit that it broke, if any. Raises `Hangup`."""
    poller, handlers = select.poll(), _handlers(run, processes, control)
    for fd in handlers:
        poller.register(fd, select.POLLOUT if fd == run.feed_fd else select.POLLIN)
    while run.exit_code is None and run.child.pid not in processes.exits:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return "wall"
        for fd, _ in poller.poll(remaining_s * 1000 + 1):
            if not handlers[fd]():
                poller.unregister(fd)
        if run.capture.flooded:
            return "output"
    return None


def _handlers(run: Run, processes: Processes, control: int) -> dict[int, Callable[[], bool]]:
    """Descriptor → what to do when it is ready; False: stop watching it."""
    os.set_blocking(run.feed_fd, False)
    handlers: dict[int, Callable[[], bool]] = {
        run.child.stdout: lambda: run.capture.read_stdout(run.child.stdout),
        run.child.stderr: lambda: run.capture.read_stderr(run.child.stderr),
        run.feed_fd: run.feed_more,
        processes.wakeup: processes.reap,
        control: _hang_up,
    }
    if run.number:
        handlers[run.outcomes] = run.note_outcome
    return handlers


def _hang_up() -> bool:
    """The worker sends nothing during a run: readable means gone."""
    raise Hangup


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
