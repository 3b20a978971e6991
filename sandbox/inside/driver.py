"""First process of a box: takes commands from the worker, runs them in forked children, answers with what they did.

    worker ──frames over a socket──► driver (pid 1 of the box) ──pipes──► interpreter, shell, commands

What keeps untrusted code from answering in its place: the control descriptor is a socket (it cannot be reopened by
way of /proc), children close it before their first own instruction, and the driver is not dumpable, so that no process
of its uid can trace it. As pid 1 of its namespace no signal from inside ends or stops it. When it exits, the kernel
kills everything else in the box; it exits when the worker's end of the socket closes, for whatever reason.

Before its answer, a streamed run sends frames with ``out`` (the stream's name) and ``data``.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import children, confine, files
from penstock.sandbox.inside.calls import Calls
from penstock.sandbox.inside.frames import Control, Hangup
from penstock.sandbox.inside.processes import kill_session


class Driver:
    """One loop: receive, do, answer."""

    def __init__(self, control: Control, settings: dict[str, Any]) -> None:
        self.control = control
        self.root = settings.get("root")
        self.counts_oom_kills = settings.get("counts_oom_kills", False)
        self.calls = Calls(settings, control.fd, control.hang_up, self.tell)
        self._id = 0

    def serve(self) -> None:
        commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self.calls.run,
            "python": self.calls.python,
            "shell": self.calls.shell,
            "write": self.write,
            "read": self.read,
        }
        self.control.send({"ready": True})
        while True:
            command = self.control.receive(self.calls.processes.wakeup, self.calls.processes.reap)
            self._id = command["id"]
            try:
                answer = commands[command["do"]](command)
            except OSError as error:
                answer = {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
            except ValueError as error:  # a path that no file system could hold
                answer = {"errno": errno.EINVAL, "error": str(error)}
            self.control.send({"id": self._id, **self.memory(), **answer})

    def tell(self, stream: str, text: str) -> None:
        self.control.send({"id": self._id, "out": stream, "data": text})

    def memory(self) -> dict[str, int]:
        """A container's cgroup is shown inside; of other boxes the worker reads it."""
        return {"oom_kills": confine.oom_kills()} if self.counts_oom_kills else {}

    def write(self, command: dict[str, Any]) -> dict[str, Any]:
        files.write(command["path"], base64.b64decode(command["data"]), self.root)
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        data = files.read(command["path"], command["max_bytes"], self.root)
        return {"data": base64.b64encode(data).decode("ascii")}


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
    driver = Driver(Control(control, answers), settings)
    try:
        driver.serve()
    except (Hangup, BrokenPipeError, ConnectionResetError):
        for pid in driver.calls.processes.tracked:  # without a box nothing else ends them
            kill_session(pid)
