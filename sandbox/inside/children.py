"""Processes that the driver forks: untrusted from their first own instruction on."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
OPEN_FILES = 256
NICENESS = 5
NO_CORE = 1
"""Bytes: too few for a core file, and the one value that also keeps a core from the host's handler behind a pipe."""


class Child:
    """A forked process with its output pipes (non-blocking read ends, owned by the driver)."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr

    def close(self) -> None:
        os.close(self.stdout)
        os.close(self.stderr)


def set_dumpable(allowed: bool) -> None:
    """While False, no process of this uid may ptrace this one or open its /proc files (memory, descriptors)."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def spawn(body: Callable[[], int], limits: dict[str, Any], stdin: int, keep: tuple[int, ...] = ()) -> Child:
    """Fork a child that gets `limits`, `stdin`, piped output and the descriptors in `keep`, then runs `body`.

    Raises:
        OSError: no process or descriptor is left in the box.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        for fd in (out_read, out_write, err_read, err_write):
            os.close(fd)
        raise
    if pid == 0:
        _become_untrusted(body, limits, (stdin, out_write, err_write), keep)
    os.close(out_write)
    os.close(err_write)
    os.set_blocking(out_read, False)
    os.set_blocking(err_read, False)
    return Child(pid, out_read, err_read)


def _become_untrusted(
    body: Callable[[], int], limits: dict[str, Any], stdio: tuple[int, int, int], keep: tuple[int, ...]
) -> NoReturn:
    code = 127
    try:
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        _close_all_but(keep)  # the control socket above all: who holds it can answer for the driver
        os.setsid()
        _reset_signals()
        _apply_limits(limits)
        code = body()
    except BaseException as error:  # noqa: BLE001 - the child's last words; it must never return into the driver's loop
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _close_all_but(keep: tuple[int, ...]) -> None:
    start = 3
    for fd in sorted(keep):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 1024)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def restore_signals() -> None:
    """Those that python ignores, for a program that is none."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _apply_limits(limits: dict[str, Any]) -> None:
    """Hard limits: code cannot raise them again. Memory is the cgroup's matter unless `address_space` is set."""
    cpu_s = int(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    if limits.get("processes"):
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    if limits.get("address_space"):
        resource.setrlimit(resource.RLIMIT_AS, (limits["address_space"], limits["address_space"]))
    os.nice(NICENESS)  # below the driver, which must get its turn to end them
    set_dumpable(True)
    if limits.get("boxed"):
        _prefer_for_oom_kill()


def _prefer_for_oom_kill() -> None:
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # out of memory must end this process, never the driver


def command(argv: list[str], cwd: str | None = None) -> int:
    """Body of a child that becomes `argv` in the folder `cwd`; returns 126 or 127 like a shell where that fails."""
    restore_signals()
    if cwd is not None:
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(2, f"{cwd}: {error.strerror}\n".encode("utf-8", "replace"))
            return 126
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126
