"""Children that the driver forks: untrusted from their first own instruction on.

`ChildTable` is the driver's table of them: fork, reap, end. As pid 1 of the box it also reaps every orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
OPEN_FILES = 256
LOCKED_BYTES = 64 << 10
"""Pages that sockets send without a copy count against it, and against nothing else."""
NO_CORE = 1
"""Bytes: too few for a core file, and the one value that also keeps a core from the host's handler behind a pipe."""


_PRCTL = ctypes.CDLL(None).prctl
"""Looked up once: in each child that would copy more of the driver's pages than the rest of its start."""
set_handler: Callable[[int, Any], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
"""`signal.signal` without its search for the names of numbers, which copies pages too. Takes plain numbers alone."""
FOLDERS = [f"{folder}/" for folder in os.environ.get("PATH", os.defpath).split(":")]
"""Folders of programs: looked up once, for the same reason."""
DEFAULT, IGNORE = int(signal.SIG_DFL), int(signal.SIG_IGN)
CHILD_ENDED, INTERRUPT = int(signal.SIGCHLD), int(signal.SIGINT)


class ForkedChild:
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
    _PRCTL(PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def spawn(body: Callable[[], int], limits: dict[str, Any], stdin: int, keep: tuple[int, ...] = ()) -> ForkedChild:
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
    return ForkedChild(pid, out_read, err_read)


def _become_untrusted(
    body: Callable[[], int], limits: dict[str, Any], stdio: tuple[int, int, int], keep: tuple[int, ...]
) -> NoReturn:
    code = 127
    try:
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        start = 3  # all but `keep` are closed, above all the control socket: its holder answers for the driver
        for fd in sorted(keep):
            os.closerange(start, fd)
            start = fd + 1
        os.closerange(start, 1024)
        os.setsid()
        signal.set_wakeup_fd(-1)
        set_handler(CHILD_ENDED, DEFAULT)
        set_handler(INTERRUPT, signal.default_int_handler)
        _apply_limits(limits)
        code = body()
    except BaseException as error:  # noqa: BLE001 - the child's last words; it must never return into the driver's loop
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def restore_signals() -> None:
    """Restores the signals that Python ignores, before another program is executed."""
    for number in (13, 25):  # SIGPIPE, SIGXFSZ
        set_handler(number, DEFAULT)


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
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED_BYTES, LOCKED_BYTES))
    os.nice(5)  # below the driver, which must get its turn to end them
    set_dumpable(True)
    if limits.get("boxed"):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")  # out of memory must end this process, never the driver
        os.close(fd)


def become_command(argv: list[str], cwd: str | None = None) -> int:
    """Body of a child that becomes `argv` in the folder `cwd`; returns 126 or 127 like a shell if that fails."""
    restore_signals()
    if cwd is not None:
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(2, f"{cwd}: {error.strerror}\n".encode("utf-8", "replace"))
            return 126
    try:
        _execute(argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


def _execute(argv: list[str]) -> NoReturn:
    """Acts as `os.execvp`, without its imports and warnings: these would copy the driver's pages. Raises OSError."""
    folders = [""] if "/" in argv[0] else FOLDERS
    missing: OSError | None = None
    refused: OSError | None = None
    for folder in folders:
        try:
            os.execv(folder + argv[0], argv)  # noqa: S606 - no shell is the point
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            refused = refused or error
    raise refused or missing or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def readable_when_a_child_ends() -> int:
    """A descriptor, the process's only one of this kind."""
    ended, signal_end = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(signal_end, False)
    set_handler(CHILD_ENDED, lambda *_: None)
    signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)
    return ended


END_S = 10.0
"""Time for killed processes to end: less than the time that the worker waits for an answer after a limit."""
PAUSE_S = 0.002


class ChildTable:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.exits: dict[int, tuple[int, float]] = {}
        """pid → (wait status, CPU seconds) of those in `tracked` that ended."""
        self.tracked: set[int] = set()
        if settings.get("reaper"):  # orphans become children of this process, as those of a pid 1 do
            _PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        set_handler(INTERRUPT, IGNORE)
        self.wakeup = readable_when_a_child_ends()

    @property
    def boxed(self) -> bool:
        """True only as pid 1 of a box's own namespace: anywhere else ``kill(-1)`` would end the whole machine."""
        return bool(self.settings["boxed"]) and os.getpid() == 1

    def spawn(
        self, body: Callable[[], int], stdin: int, keep: tuple[int, ...] = (), spared: Sequence[ForkedChild] = ()
    ) -> ForkedChild:
        """Start a program. In a full box processes of earlier code are ended first, `spared` and theirs last.

        Raises OSError where even that makes no room.
        """
        for make_room in (lambda: self.kill_all_but(spared), self.kill_all):
            try:
                return self._track(spawn(body, self.settings, stdin, keep))
            except BlockingIOError:
                make_room()
        return self._track(spawn(body, self.settings, stdin, keep))

    def _track(self, child: ForkedChild) -> ForkedChild:
        self.tracked.add(child.pid)
        return child

    def forget(self, child: ForkedChild) -> None:
        child.close()
        self.tracked.discard(child.pid)
        self.exits.pop(child.pid, None)  # its number may be given to another process

    def ended(self, child: ForkedChild) -> bool:
        self.reap()
        return child.pid in self.exits

    def reap(self) -> bool:
        """Always True: stay registered with the poller that calls this."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.tracked:
                    self.exits[pid] = (status, usage.ru_utime + usage.ru_stime)
        return True

    def kill_all(self) -> None:
        """Every process but the driver, atomically against forks; without a box only the children's sessions."""
        for child in self.tracked - set(self.exits):
            kill_session(child)
        for _ in range(500 if self.boxed else 0):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            self.reap()
            time.sleep(PAUSE_S)  # the kernel needs a moment to end them; the driver has one thread and no event loop
        if not self.boxed:
            self.kill_all_but(())
        self.reap()

    def end(self) -> None:
        """Ends all that run, when the driver ends. In a box it waits for them too: of those that the kernel ends with
        pid 1, it charges what they have spent to none."""
        if not self.boxed:
            for child in self.tracked:  # without a box nothing else ends them
                kill_session(child)
            self.kill_all_but(())
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                continue

    def kill_all_but(self, spared: Sequence[ForkedChild]) -> bool:
        """Every process that descends from none of `spared`; False if they fork faster than this can end them.

        A killed process needs a core to end on, and may wait for one on a busy machine: only new ones count as forks.
        """
        if not self.boxed and not self.settings.get("reaper"):
            return True  # what code started need not descend from this process
        killed: set[int] = set()
        rounds_with_new, give_up_at = 0, time.monotonic() + END_S
        while strangers := set(strangers_to({child.pid for child in spared})):
            if strangers - killed:
                rounds_with_new += 1
            # rounds of killing in which new processes may appear; more means a fork bomb
            if rounds_with_new > 20 or time.monotonic() > give_up_at:
                return False
            for pid in strangers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= strangers
            self.reap()
            time.sleep(PAUSE_S)
        return True


def strangers_to(spared: set[int]) -> list[int]:
    """Returns living descendants except `spared` and theirs; for pid 1, all others of its namespace."""
    me = os.getpid()
    parents = {pid: _parent_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != me}
    own = _with_descendants(set(spared), parents)
    mine = set(parents) if me == 1 else _with_descendants({me}, parents)
    return [pid for pid, parent in parents.items() if parent and pid in mine and pid not in own]


def _with_descendants(roots: set[int], parents: dict[int, int]) -> set[int]:
    pids = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def _parent_of(pid: int) -> int:
    """-1 would be a valid kill target, so: 0 where the process is gone or a zombie.

    One whose first thread ended looks like a zombie while its other threads run on.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1 else int(fields[1])  # 17: the number of threads


def kill_session(pid: int) -> None:
    """Kills the process group of a child, and the child itself: right after the fork it has no group of its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
