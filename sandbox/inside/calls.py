"""The commands that run code: a program, a call of the interpreter, a call of the shell."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import children, interpreter, segments, shell
from penstock.sandbox.inside.capture import Capture
from penstock.sandbox.inside.processes import Processes, kill_session
from penstock.sandbox.inside.residents import Resident, Residents
from penstock.sandbox.inside.watch import Run, pump, verdict

Tell = Callable[[str, str], None]


class Calls:
    def __init__(self, settings: dict[str, Any], control: int, hang_up: Callable[[], bool], tell: Tell) -> None:
        self.settings = settings
        self.processes = Processes(settings)
        self.residents = Residents(self.processes)
        self._interrupts = {self.processes.wakeup: self.processes.reap, control: hang_up}
        self._tell = tell

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        lost_before = set(self.residents.untold)
        stdin_read, stdin_write = os.pipe()
        body = lambda: children.command(command["argv"], command.get("cwd"))  # noqa: E731
        try:
            child = self.processes.spawn(body, stdin_read, spared=self.residents.children())
        except OSError:
            os.close(stdin_write)
            raise
        finally:
            os.close(stdin_read)
        run = Run(child, self._capture(command), stdin_write, command["stdin"].encode("utf-8", "replace"))
        answer = self._watch(run, command["timeout_s"], self.residents.kill_strangers)
        run.end_feed()
        self.processes.forget(child)
        return {**answer, "state_lost": bool(self.residents.untold - lost_before)}

    def python(self, command: dict[str, Any]) -> dict[str, Any]:
        def feed(number: int, _: Resident) -> bytes:
            code = command["code"].encode("utf-8", "replace")
            return interpreter.REQUEST.pack(number, len(code)) + code

        return self._call("python", command, feed)

    def shell(self, command: dict[str, Any]) -> dict[str, Any]:
        if "\0" in command["command"]:
            raise OSError(errno.EINVAL, "the command holds a NUL character")
        return self._call("shell", command, lambda n, it: shell.request(n, command["command"], it.last_exit_code))

    def _call(self, kind: str, command: dict[str, Any], feed: Callable[[int, Resident], bytes]) -> dict[str, Any]:
        resident = self.residents.get(kind)
        number = int.from_bytes(os.urandom(4), "big") | 1  # not to be guessed by what earlier calls left running
        run = Run(resident.child, self._capture(command), resident.requests, feed(number, resident))
        run.expect_outcome(number, resident.outcomes)
        answer = self._watch(run, command["timeout_s"], lambda: self.residents.kill(kind))
        resident.last_exit_code = run.exit_code or 0
        return {**answer, "state_lost": self.residents.tell(kind)}

    def _capture(self, command: dict[str, Any]) -> Capture:
        return Capture(self.settings["output_bytes"], self._tell if command.get("tell") else None)

    def _watch(self, run: Run, timeout_s: float, kill: Callable[[], None]) -> dict[str, Any]:
        """What the run did; whatever a limit ended is gone afterwards, with all that it had started."""
        started = time.monotonic()
        broken = pump(run, started + timeout_s, self.processes, self._interrupts)
        if broken is not None:
            kill_session(run.child.pid)
            kill()
        run.drain()
        duration_s = time.monotonic() - started
        outcome = verdict(run, self.processes, broken)
        self.residents.settle()
        if self.processes.boxed:
            segments.remove_orphans()
        stdout, stderr = run.capture.texts()
        return {"stdout": stdout, "stderr": stderr, "duration_s": duration_s, **outcome}
