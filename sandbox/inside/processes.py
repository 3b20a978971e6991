"""The driver's table of children: fork, reap, end. As pid 1 of the box it also inherits and reaps every orphan."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.sandbox.inside import children

KILL_ROUNDS = 500
PAUSE_S = 0.002
THREADS = 17
"""In /proc/PID/stat, counted from the state on."""


class Processes:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.exits: dict[int, tuple[int, float]] = {}
        """pid → (wait status, CPU seconds) of those in `tracked` that ended."""
        self.tracked: set[int] = set()
        self.wakeup, signal_end = os.pipe()
        """Readable after a child ended."""
        os.set_blocking(self.wakeup, False)
        os.set_blocking(signal_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)

    @property
    def boxed(self) -> bool:
        """True only as pid 1 of a box's own namespace: anywhere else ``kill(-1)`` would end the whole machine."""
        return bool(self.settings["boxed"]) and os.getpid() == 1

    def spawn(
        self, body: Callable[[], int], stdin: int, keep: tuple[int, ...] = (), spared: Sequence[children.Child] = ()
    ) -> children.Child:
        """Where the box is full, what earlier code left running is ended first, `spared` and theirs last of all.

        Raises OSError where even that makes no room.
        """
        for make_room in (lambda: self.kill_all_but(spared), self.kill_all):
            try:
                return self._track(children.spawn(body, self.settings, stdin, keep))
            except BlockingIOError:
                make_room()
        return self._track(children.spawn(body, self.settings, stdin, keep))

    def _track(self, child: children.Child) -> children.Child:
        self.tracked.add(child.pid)
        return child

    def forget(self, child: children.Child) -> None:
        child.close()
        self.tracked.discard(child.pid)
        self.exits.pop(child.pid, None)  # its number may be given to another process

    def ended(self, child: children.Child) -> bool:
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
        for _ in range(KILL_ROUNDS if self.boxed else 0):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            self.reap()
            time.sleep(PAUSE_S)
        self.reap()

    def kill_all_but(self, spared: Sequence[children.Child]) -> bool:
        """Every process that descends from none of `spared`; False where they fork faster than this can end them."""
        for _ in range(20):
            strangers = strangers_to({child.pid for child in spared}) if self.boxed else []
            if not strangers:
                return True
            for pid in strangers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(PAUSE_S)
        return False


def strangers_to(spared: set[int]) -> list[int]:
    """Living processes of this pid namespace but pid 1, those in `spared` and their descendants."""
    parents = {pid: _parent_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != 1}
    own = set(spared)
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return [pid for pid, parent in parents.items() if parent and pid not in own]


def _parent_of(pid: int) -> int:
    """-1 would be a valid kill target, so: 0 where the process is gone or a zombie.

    One whose first thread ended looks like a zombie while its other threads run on.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") and int(fields[THREADS]) <= 1 else int(fields[1])


def kill_session(pid: int) -> None:
    """A child leads its own process group, but for the moment right after its fork."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
