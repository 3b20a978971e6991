"""The commands that run code: a program, served by the worker or not, a call of the interpreter, a call of the shell.

`pump` moves bytes in and out until the run ends, by itself or by a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import interpreter, shell
from penstock.sandbox.inside.capture import OutputCapture, TailCapture
from penstock.sandbox.inside.children import ChildTable, ForkedChild, become_command, kill_session
from penstock.sandbox.inside.forward import ForwardedPort
from penstock.sandbox.inside.interpreter import OUTCOME_BYTES
from penstock.sandbox.inside.memory import IDLE_LOOK_S, MemoryWatch
from penstock.sandbox.inside.persistent import PersistentChild, PersistentChildren

Handlers = dict[int, Callable[[], bool]]
"""Descriptor → what to do when it is ready; False: stop watching it."""


class WatchedRun:
    """A command, fed its stdin, or a call of a resident, fed its code."""

    def __init__(self, child: ForkedChild, capture: OutputCapture, feed_fd: int, feed: bytes) -> None:
        self.child = child
        self.capture = capture
        self.feed_fd = feed_fd
        self.feed = feed
        self.number = 0
        """Which call of a resident; 0 for a command."""
        self.outcomes = -1
        """Descriptor on which the resident reports that a call ended."""
        self.exit_code: int | None = None
        """Set once the resident said so; for all else the kernel's word counts."""
        self.stop_asked: Callable[[], bool] = lambda: False
        """True if the worker wants the run to end now."""

    def expect_outcome(self, number: int, outcomes: int) -> None:
        """Prepares for the outcome of a resident's call `number`; drops what earlier calls left in the pipe."""
        self.number, self.outcomes = number, outcomes
        with contextlib.suppress(BlockingIOError):
            while os.read(outcomes, 65536):
                continue

    def handlers(self) -> Handlers:
        os.set_blocking(self.feed_fd, False)
        handlers = {
            self.child.stdout: lambda: self.capture.read_stdout(self.child.stdout),
            self.child.stderr: lambda: self.capture.read_stderr(self.child.stderr),
            self.feed_fd: self.feed_more,
        }
        if self.number:
            handlers[self.outcomes] = self.note_outcome
        return handlers

    def feed_more(self) -> bool:
        """False once all is written (or the reader is gone)."""
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
        """Read what is in the pipes already; a daemon that holds them open is not waited for."""
        for read, fd in ((self.capture.read_stdout, self.child.stdout), (self.capture.read_stderr, self.child.stderr)):
            while not self.capture.flooded and read(fd):
                continue
        self.capture.finish()


def pump(
    run: WatchedRun, deadline: float, processes: ChildTable, interrupts: Handlers, memory: MemoryWatch | None = None
) -> str | None:
    """Move bytes until the run ends; returns the limit that it broke, if any. Raises what `interrupts` raise."""
    poller, handlers = select.poll(), {**run.handlers(), **interrupts}
    next_look = 0.0
    for fd in handlers:
        poller.register(fd, select.POLLOUT if fd == run.feed_fd else select.POLLIN)
    while run.exit_code is None and run.child.pid not in processes.exits:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return "wall"
        if memory is not None:
            if time.monotonic() >= next_look:
                if memory.exceeded():
                    return "memory"
                next_look = time.monotonic() + memory.pause_s
            remaining_s = min(remaining_s, memory.pause_s)
        for fd, _ in poller.poll(min(remaining_s, 3600.0) * 1000 + 1):  # poll() counts milliseconds in 31 bits
            if not handlers[fd]():
                poller.unregister(fd)
        if run.capture.flooded or run.stop_asked():
            return "output" if run.capture.flooded else "stopped"
    return None


def verdict(run: WatchedRun, processes: ChildTable, broken: str | None) -> dict[str, Any]:
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


TABLE = "/proc/sysvipc/shm"
"""Table of segments in the reader's own namespace. After a line of headings: key, shmid, perms, size, cpid, lpid, …"""


def remove_orphan_segments() -> None:
    """Removes unattached segments whose creator is gone: they count against the box and starve later runs.

    Only for the first process of a box, whose namespace is the box's alone.
    """
    try:
        table = _read_all(TABLE)
    except OSError:  # a kernel without System V memory
        return
    for line in table.splitlines()[1:]:
        fields = line.split()
        segment, maker, attached = int(fields[1]), int(fields[4]), int(fields[6])
        if attached == 0 and not os.path.exists(f"/proc/{maker}"):
            ctypes.CDLL(None).shmctl(segment, 0, None)  # IPC_RMID


def _read_all(path: str) -> bytes:
    """After every run, so without a file object, whose making alone would copy pages."""
    fd, data = os.open(path, os.O_RDONLY | os.O_CLOEXEC), b""
    try:
        while chunk := os.read(fd, 65536):
            data += chunk
    finally:
        os.close(fd)
    return data


OnOutput = Callable[[str, str], None]


class Calls:
    def __init__(  # noqa: PLR0917 - made in one place
        self,
        settings: dict[str, Any],
        control: int,
        hang_up: Callable[[], bool],
        on_output: OnOutput,
        port: ForwardedPort,
        read_frame: Callable[[], dict[str, Any]],
    ) -> None:
        """`port`: what a served run may reach; `read_frame`: the worker's next frame, during such a run alone."""
        self.settings = settings
        self.port = port
        self._control = control
        self._read_frame = read_frame
        self.processes = ChildTable(settings)
        self.persistent = PersistentChildren(self.processes)
        self._interrupts = {self.processes.wakeup: self.processes.reap, control: hang_up}
        self._on_output = on_output
        self._memory = (
            MemoryWatch(settings["memory_bytes"], settings["send_bytes"]) if "memory_bytes" in settings else None
        )
        self.idle_look_s = IDLE_LOOK_S if self._memory is not None else None
        """Between two calls of `look_idle`; None: only when a child ended."""

    def look_idle(self) -> None:
        """Reaps what ended, so that zombies do not fill the box, and ends what fills its memory between two calls."""
        self.processes.reap()
        if self._memory is not None and self._memory.exceeded():
            self.persistent.kill_everything()

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        lost_before = set(self.persistent.unreported)
        served = self._serve() if command.get("serve") else {}
        stdin_read, stdin_write = os.pipe()
        body = lambda: become_command(command["argv"], command.get("cwd"))  # noqa: E731
        try:
            child = self.processes.spawn(body, stdin_read, spared=self.persistent.children())
        except OSError:
            os.close(stdin_write)
            raise
        finally:
            os.close(stdin_read)
        run = WatchedRun(child, self._capture(command), stdin_write, command["stdin"].encode("utf-8", "replace"))
        if served:
            run.stop_asked = lambda: self.port.stopped
        try:
            answer = self._watch(run, command["timeout_s"], self.persistent.kill_strangers, served)
        finally:
            if served:
                self.port.end()
        run.end_feed()
        self.processes.forget(child)
        return {**answer, "state_lost": bool(self.persistent.unreported - lost_before)}

    def _serve(self) -> Handlers:
        """Handlers of a served run in addition to its own pipes. The worker's frames are then no hang-up."""
        return {
            self._control: lambda: self.port.take(self._read_frame()),
            self.port.begin(): self.port.ready,
        }

    def python(self, command: dict[str, Any]) -> dict[str, Any]:
        def feed(number: int, _: PersistentChild) -> bytes:
            code = command["code"].encode("utf-8", "replace")
            return interpreter.REQUEST.pack(number, len(code)) + code

        return self._call("python", command, feed)

    def shell(self, command: dict[str, Any]) -> dict[str, Any]:
        if "\0" in command["command"]:
            raise OSError(errno.EINVAL, "the command holds a NUL character")
        return self._call("shell", command, lambda n, it: shell.request(n, command["command"], it.last_exit_code))

    def _call(
        self, kind: str, command: dict[str, Any], feed: Callable[[int, PersistentChild], bytes]
    ) -> dict[str, Any]:
        resident = self.persistent.get(kind)
        number = int.from_bytes(os.urandom(4), "big") | 1  # not to be guessed by what earlier calls left running
        run = WatchedRun(resident.child, self._capture(command), resident.requests, feed(number, resident))
        run.expect_outcome(number, resident.outcomes)
        answer = self._watch(run, command["timeout_s"], lambda: self.persistent.kill(kind))
        resident.last_exit_code = run.exit_code or 0
        return {**answer, "state_lost": self.persistent.report_loss(kind)}

    def _capture(self, command: dict[str, Any]) -> OutputCapture:
        if command.get("serve"):
            return TailCapture(self.settings["output_bytes"])
        return OutputCapture(self.settings["output_bytes"], self._on_output if command.get("stream") else None)

    def _watch(
        self, run: WatchedRun, timeout_s: float, kill: Callable[[], None], served: Handlers | None = None
    ) -> dict[str, Any]:
        """The result of the run; what a limit ended is gone afterwards, with all that it had started."""
        started = time.monotonic()
        interrupts = {**self._interrupts, **(served or {})}
        broken = pump(run, started + timeout_s, self.processes, interrupts, self._memory)
        if broken is not None:
            kill_session(run.child.pid)
            kill()
        box_full = broken == "memory" and self._make_room()
        run.drain()
        duration_s = time.monotonic() - started
        outcome = verdict(run, self.processes, broken)
        self.persistent.settle()
        if self.processes.boxed:
            remove_orphan_segments()
        stdout, stderr = run.capture.texts()
        return {"stdout": stdout, "stderr": stderr, "duration_s": duration_s, "box_full": box_full, **outcome}

    def _make_room(self) -> bool:
        """Ends what holds the box over its memory; True if that leaves no room for another call."""
        assert self._memory is not None
        for end in (self.processes.reap, self.persistent.kill_everything):
            end()
            if not self._memory.exceeded():
                return self._memory.full()
        return True
