"""Runs a command and ends it, with every process it started, when its owner is gone: ``python guard.py COMMAND...``.

An engine is several processes. ``kill -9`` of its owner must leave none behind, nor ``kill -9`` of one of them its
shared memory, which outlives every process. The guard leads a process group that the owner starts for it, and its
standard input is a pipe that only the owner holds (`process.guard_command`):

    owner closes the pipe, or dies however it dies  ->  end of file  ->  SIGTERM to the group, grace, SIGKILL
    the command ends by itself                      ->  the rest of the group is ended, the exit status is passed on
    the guard is killed -9                          ->  the kernel sends the command SIGTERM (parent-death signal)

It looks every `LOOK_S` seconds which segments and semaphores its group has mapped, and removes those left at the end.

Standard library only and no import of ours: it is run as a file and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL to the group; engines need it to remove their shared memory."""
LOOK_S = 30.0
"""Interval of looks at what the group has mapped: what is created and orphaned between two of them may stay."""
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where Linux keeps POSIX shared memory and semaphores
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Runs `command`; returns its exit status, 128 + the signal that killed it, or 0 where the owner ended it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group, the guard included
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_before_exec)  # noqa: PLW1509 one thread
    segments = Segments()
    status = _wait(child, segments)
    if status < 0:  # before the grace period: the cause belongs in the log at once
        print(f"guard: the command ended with exit code {status}", file=sys.stderr, flush=True)
    segments.look()
    _end_group(child)
    segments.remove()
    return status if status >= 0 else 128 - status


def _before_exec() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(child: subprocess.Popen[bytes], segments: Segments) -> int:
    """Returns when the command ended, or at the end of standard input."""
    ended = os.pidfd_open(child.pid)
    while True:
        ready, _, _ = select.select([ended, 0], [], [], LOOK_S)
        if ended in ready:
            return child.wait()
        if 0 in ready and not os.read(0, 4096):
            return 0
        segments.look()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    # Others of the group are not our children, so nothing reports their end: look. No event loop runs here.
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and (child.poll() is None or _others()):
        time.sleep(0.02)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and (remaining := _others()):  # in a loop: one may have started another
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Segments:
    """POSIX shared memory and semaphores that processes of the group were seen to have mapped."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        """Inodes, not names: a name may be reused by another process, and a semaphore is mapped under another name."""

    def look(self) -> None:
        """Adds the segments that living processes of the group have mapped now."""
        for pid in _others():
            self.add(pid)

    def add(self, pid: int) -> None:
        """Adds what this process has mapped now."""
        self._seen |= _mapped_by(pid)

    def remove(self) -> None:
        """Removes the segments that exist and are not mapped: another process may share one with the group."""
        if not self._seen:
            return
        remaining = {entry.inode(): entry.path for entry in os.scandir(SHARED_MEMORY) if entry.inode() in self._seen}
        mapped = set().union(*map(_mapped_by, _processes()))
        for inode, path in remaining.items():
            if inode not in mapped:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _mapped_by(pid: int) -> set[int]:
    """Inodes of segments; empty for a process that is gone, and for another user's."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    # A line of /proc/PID/maps: … inode path. Files in folders below are no segments: weights may be kept there.
    return {int(match[1]) for line in lines if (match := re.search(rf" (\d+) +{SHARED_MEMORY}[^/]+$", line))}


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _others() -> list[int]:
    """Living members of this process group, except the guard itself."""
    group = os.getpgrp()
    return [pid for pid in _processes() if pid != os.getpid() and _group_of(pid) == group]


def _group_of(pid: int) -> int | None:
    try:
        # pid (command, which may hold anything) state ppid pgrp …
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None  # it has ended
    return None if state in "ZX" else int(group)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
