"""First process of a box: takes commands from the worker, runs them in forked children, answers with what they did.

    worker ──frames over a socket──► driver (pid 1 of the box) ──pipes──► interpreter, commands

What keeps untrusted code from answering in its place: the control descriptor is a socket (it cannot be reopened by
way of /proc), children close it before their first own instruction, and the driver is not dumpable, so that no process
of its uid can trace it. As pid 1 of its namespace no signal from inside ends or stops it. When it exits, the kernel
kills everything else in the box; it exits when the worker's end of the socket closes, for whatever reason.

A frame is 4 bytes of length (big endian), then JSON.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import children, confine, files, interpreter
from penstock.sandbox.inside.processes import Processes, kill_session
from penstock.sandbox.inside.watch import Hangup, Run, pump, verdict

LENGTH = struct.Struct(">I")


class Driver:
    def __init__(self, control: int, answers: int, settings: dict[str, Any]) -> None:
        self.control = control
        self.answers = answers
        self.settings = settings
        self.processes = Processes(settings)
        self.interpreter: children.Child | None = None
        self.requests = self.outcomes = -1
        self.nothing = os.open(os.devnull, os.O_RDONLY)

    # ---- the loop: receive, do, answer

    def serve(self) -> None:
        commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self.run,
            "python": self.python,
            "write": self.write,
            "read": self.read,
        }
        self.send({"ready": True})
        while True:
            command = self.receive()
            try:
                answer = commands[command["do"]](command)
            except OSError as error:
                answer = {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
            except ValueError as error:  # a path that no file system could hold
                answer = {"errno": errno.EINVAL, "error": str(error)}
            self.send({"id": command["id"], **self.memory(), **answer})

    def receive(self) -> dict[str, Any]:
        """The next command; reaps what ends meanwhile, so that zombies do not fill the box's process limit."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.processes.wakeup, select.POLLIN)
        while self.control not in [fd for fd, _ in poller.poll()]:
            self.processes.reap()
        (size,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        command: dict[str, Any] = json.loads(self._read_exactly(size))
        return command

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.control, min(size - len(data), 1 << 20))
            if not chunk:
                raise Hangup
            data += chunk
        return bytes(data)

    def send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode("ascii")
        data = LENGTH.pack(len(body)) + body
        while data:
            data = data[os.write(self.answers, data) :]

    def memory(self) -> dict[str, int]:
        """In a container nobody but the driver sees its cgroup."""
        return {"oom_kills": confine.oom_kills()} if self.settings.get("counts_oom_kills") else {}

    # ---- commands

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        stdin_read, stdin_write = os.pipe()
        try:
            child = self.processes.spawn(lambda: children.command(command["argv"]), stdin_read, spared=self.interpreter)
        except OSError:
            os.close(stdin_write)
            raise
        finally:
            os.close(stdin_read)
        stdin = command["stdin"].encode("utf-8", "replace")
        run = Run(child, self.settings["output_bytes"], stdin_write, stdin)
        had_interpreter = self.interpreter is not None
        answer = self.watch(run, command["timeout_s"])
        run.end_feed()
        self.processes.forget(child)
        return {**answer, "state_lost": had_interpreter and self.interpreter is None}

    def python(self, command: dict[str, Any]) -> dict[str, Any]:
        ended_before = self.interpreter is not None and self.processes.ended(self.interpreter)
        if self.interpreter is None or ended_before:
            self.start_interpreter()
        assert self.interpreter is not None
        number = int.from_bytes(os.urandom(4), "big") | 1  # not to be guessed by what earlier calls left running
        code = command["code"].encode("utf-8", "replace")
        feed = interpreter.REQUEST.pack(number, len(code)) + code
        run = Run(self.interpreter, self.settings["output_bytes"], self.requests, feed)
        run.number, run.outcomes = number, self.outcomes
        run.drop_old_outcomes()
        answer = self.watch(run, command["timeout_s"])
        return {**answer, "state_lost": ended_before or self.interpreter is None}

    def write(self, command: dict[str, Any]) -> dict[str, Any]:
        files.write(command["path"], base64.b64decode(command["data"]), self.settings.get("root"))
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        data = files.read(command["path"], command["max_bytes"], self.settings.get("root"))
        return {"data": base64.b64encode(data).decode("ascii")}

    # ---- runs and the interpreter

    def watch(self, run: Run, timeout_s: float) -> dict[str, Any]:
        """What the run did; whatever a limit ended is gone afterwards, with all that it had started."""
        started = time.monotonic()
        broken = pump(run, started + timeout_s, self.processes, self.control)
        if broken is not None:
            self.end_run(run)
        run.drain()
        duration_s = time.monotonic() - started
        outcome = verdict(run, self.processes, broken)
        if run.child is self.interpreter and (broken is not None or self.processes.ended(run.child)):
            self.end_interpreter()
        stdout, stderr = run.capture.texts()
        return {"stdout": stdout, "stderr": stderr, "duration_s": duration_s, **outcome}

    def end_run(self, run: Run) -> None:
        if run.child is self.interpreter:
            self.processes.kill_all()
            return
        kill_session(run.child.pid)
        if not self.processes.kill_all_but(self.interpreter):
            self.processes.kill_all()
            self.end_interpreter()

    def start_interpreter(self) -> None:
        self.end_interpreter()
        requests, self.requests = os.pipe()
        self.outcomes, outcomes = os.pipe()
        os.set_blocking(self.outcomes, False)
        try:
            body = lambda: interpreter.serve(requests, outcomes)  # noqa: E731
            self.interpreter = self.processes.spawn(body, self.nothing, (requests, outcomes))
        finally:
            os.close(requests)
            os.close(outcomes)
            if self.interpreter is None:
                os.close(self.requests)
                os.close(self.outcomes)

    def end_interpreter(self) -> None:
        """With it goes everything else in the box: what its code started must not live on unwatched."""
        if self.interpreter is None:
            return
        self.processes.kill_all()
        self.processes.forget(self.interpreter)
        os.close(self.requests)
        os.close(self.outcomes)
        self.interpreter = None


def main() -> None:
    """Argument 1: the settings. Descriptor 0: commands; answers go there too where it is a socket, else to 1.

    Ends when the worker does.
    """
    children.set_dumpable(False)
    settings = json.loads(sys.argv[1])
    if "filter" in settings:
        confine.install_filter(base64.b64decode(settings["filter"]))
    control = os.dup(0)
    answers = os.dup(1) if settings.get("pipes") else control
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # 2 stays: the driver's own last words, never a child's
        os.dup2(null, number)
    os.close(null)
    driver = Driver(control, answers, settings)
    try:
        driver.serve()
    except (Hangup, BrokenPipeError, ConnectionResetError):
        for pid in driver.processes.tracked:  # without a box nothing else ends them
            kill_session(pid)
