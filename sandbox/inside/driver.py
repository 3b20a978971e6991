"""First process of a box: receives commands from the worker, runs them in forked children, sends back results.

    worker ──frames over a socket──► driver (pid 1 of the box) ──pipes──► interpreter, shell, commands

A frame is 4 bytes of length (big endian), then JSON. Before its result, a streamed run sends frames with ``out`` (the
stream's name) and ``data``; during a served run both sides send those of `forward.py`.

What keeps untrusted code from answering in its place: the control descriptor is a socket (it cannot be reopened by
way of /proc), children close it before their first own instruction, and the driver is not dumpable, so that no process
of its uid can trace it. As pid 1 of its namespace no signal from inside ends or stops it. When it exits, the kernel
kills everything else in the box; it exits when the worker's end of the socket closes, for whatever reason.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import select
import stat
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

from penstock.sandbox.inside import children
from penstock.sandbox.inside.calls import Calls
from penstock.sandbox.inside.forward import ForwardedPort

LENGTH = struct.Struct(">I")


class Hangup(Exception):
    """The worker is gone."""


class Control:
    def __init__(self, fd: int, answers: int) -> None:
        """`fd`: source of commands; `answers`: target of answers, the same if it is a socket."""
        self.fd = fd
        self.answers = answers

    def receive(self, wakeup: int, look: Callable[[], Any], look_s: float | None) -> dict[str, Any]:
        """The next command; calls `look` when a child ends, and every `look_s` seconds."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(wakeup, select.POLLIN)
        while self.fd not in [fd for fd, _ in poller.poll(None if look_s is None else look_s * 1000)]:
            look()
        return self.read_frame()

    def read_frame(self) -> dict[str, Any]:
        """The worker's next frame, waited for."""
        (size,) = LENGTH.unpack(self._read_exactly(LENGTH.size))
        frame: dict[str, Any] = json.loads(self._read_exactly(size))
        return frame

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.fd, min(size - len(data), 1 << 20))
            if not chunk:
                raise Hangup
            data += chunk
        return bytes(data)

    def send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode("ascii")
        data = LENGTH.pack(len(body)) + body
        while data:
            data = data[os.write(self.answers, data) :]

    def hang_up(self) -> bool:
        """The worker sends nothing during a run: readable means gone."""
        raise Hangup


PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Counters of the container's own cgroup, version 2 and 1, as container engines show them inside."""


_PRCTL = ctypes.CDLL(None, use_errno=True).prctl


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def filter_of(settings: dict[str, Any]) -> _Program | None:
    """The system-call filter of `settings`, ready to be installed; None if they have none."""
    if "filter" not in settings:
        return None
    program = base64.b64decode(settings["filter"])
    return _Program(len(program) // 8, program)


def install_filter(program: _Program) -> None:
    """Install a filter for this process and its descendants, on top of the engine's own. Raises OSError."""
    if _PRCTL(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _PRCTL(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel refuses the system-call filter")


def oom_kills(counters: Iterable[str | os.PathLike[str]]) -> int | None:
    """Processes that the kernel ended for want of memory, by the first counter that can be read; None if none can."""
    for path in counters:
        try:
            with open(path, encoding="ascii") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except OSError:
            continue
    return None


def write_file(path: str, data: bytes, root: str | None) -> None:
    """Raises OSError, also where `path` is not a regular file (opening a FIFO must not block the driver)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(_checked(path, root), flags, 0o644)
    try:
        _require_regular(fd, path)
        os.ftruncate(fd, 0)
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def read_file(path: str, max_bytes: int, root: str | None) -> bytes:
    fd = os.open(_checked(path, root), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(fd, path)
        data = b""
        while len(data) < max_bytes and (chunk := os.read(fd, max_bytes - len(data))):
            data += chunk
        return data
    finally:
        os.close(fd)


def _require_regular(fd: int, path: str) -> None:
    """/proc has regular files too, which the driver would open with its own rights: its memory, its oom_score_adj."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(1, "not a regular file", path)
    if any((status.st_dev, status.st_ino) == own for own in _own_files(fd)):
        raise PermissionError(1, "not a regular file of the box", path)
    if os.path.isdir("/proc") and status.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(1, "a file of /proc", path)


def _own_files(but: int) -> list[tuple[int, int]]:
    """Files that this process has open, such as its stderr: names like /dev/stderr and /dev/fd/2 lead there."""
    files = []
    for number in {int(name) for name in os.listdir("/proc/self/fd")} if os.path.isdir("/proc/self/fd") else range(16):
        try:
            status = os.fstat(number)
        except OSError:
            continue
        if number != but:
            files.append((status.st_dev, status.st_ino))
    return files


def _checked(path: str, root: str | None) -> str:
    """Refuses paths that resolve outside `root`, if nothing but this check confines them (no box around)."""
    if "\0" in path:
        raise FileNotFoundError(2, "path holds a NUL", path.replace("\0", "\\0"))
    if root is not None and not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep):
        raise PermissionError(1, "outside the session's folder", path)
    return path


class BoxDriver:
    """One loop: receive, do, answer."""

    def __init__(self, control: Control, settings: dict[str, Any]) -> None:
        self.control = control
        self.root = settings.get("root")
        self.counts_oom_kills = settings.get("counts_oom_kills", False)
        port = ForwardedPort(control.send)
        self.calls = Calls(settings, control.fd, control.hang_up, self.send_output, port, control.read_frame)
        self._id = 0

    def serve(self) -> None:
        commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self.calls.run,
            "python": self.calls.python,
            "shell": self.calls.shell,
            "listen": self.listen,
            "write": self.write,
            "read": self.read,
        }
        self.control.send({"ready": True})
        while True:
            command = self.control.receive(self.calls.processes.wakeup, self.calls.look_idle, self.calls.idle_look_s)
            if "do" not in command:  # for a connection of a run that has ended
                continue
            self._id = command["id"]
            try:
                answer = commands[command["do"]](command)
            except OSError as error:
                answer = {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
            except ValueError as error:  # a path that no file system could hold
                answer = {"errno": errno.EINVAL, "error": str(error)}
            self.control.send({"id": self._id, **self.memory(), **answer})

    def send_output(self, stream: str, text: str) -> None:
        self.control.send({"id": self._id, "out": stream, "data": text})

    def memory(self) -> dict[str, int]:
        """A container's cgroup is shown inside; of other boxes the worker reads it."""
        return {"oom_kills": oom_kills(OOM_COUNTERS) or 0} if self.counts_oom_kills else {}

    def listen(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"port": self.calls.port.open()}

    def write(self, command: dict[str, Any]) -> dict[str, Any]:
        write_file(command["path"], base64.b64decode(command["data"]), self.root)
        return {}

    def read(self, command: dict[str, Any]) -> dict[str, Any]:
        data = read_file(command["path"], command["max_bytes"], self.root)
        return {"data": base64.b64encode(data).decode("ascii")}


def main() -> None:
    """Argument 1: the settings."""
    settings = json.loads(sys.argv[1])
    serve(settings, filter_of(settings))


def serve(settings: dict[str, Any], system_calls: _Program | None) -> None:
    """Descriptor 0: commands; answers go there too if it is a socket, else to 1. Ends when the worker does."""
    children.set_dumpable(False)
    if system_calls is not None:
        install_filter(system_calls)
    control = os.dup(0)
    answers = os.dup(1) if settings.get("pipes") else control
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # 2 stays: the driver's own last words, never a child's
        os.dup2(null, number)
    os.close(null)
    driver = BoxDriver(Control(control, answers), settings)
    try:
        driver.serve()
    except (Hangup, BrokenPipeError, ConnectionResetError):
        driver.calls.processes.end()
