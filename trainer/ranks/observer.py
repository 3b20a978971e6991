"""What one trainer rank says of itself in shared memory, and what its monitor sees of its process.

    rank: write_notes ──► 4 KiB of memory without a file ──► monitor: read_notes, with /proc: `Observer.look`

Notes outlive any pause of the rank: those of a stopped process say what it did when it was stopped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common import ProcessTable

LOOK_S = 1.0
"""Between two looks, and two notes."""
WINDOW_S = 5.0
"""Over which use of CPU and disk is measured."""
IDLE_SHARE = 0.01
"""Of a core: a rank that uses less does nothing. One percent is five of the kernel's ticks per window."""
IDLE_BYTES = 1 << 16
"""Read or written per window."""
STALE_S = 5.0
"""Notes or an event loop older than this stand still."""
_USED, _WAITED_FOR = slice(11, 13), slice(13, 15)
"""Ticks in /proc/PID/stat, after the name: a process's own, and those of its children that have ended."""
_HEAD = struct.Struct("<dddBxxxI")
NOTES_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Notes:
    """What a rank says of itself, in memory that outlives any pause of its process."""

    written_at: float
    """By the clock that all processes of a machine share, as the others."""
    loop_at: float
    """Its event loop turned last."""
    busy_since: float
    """Its torch thread has work; 0: it has none."""
    waits: bool
    """That thread is in a call that waits for other ranks."""
    doing: str
    """Work and line of code, for people."""


def write_notes(memory: mmap.mmap, notes: Notes) -> None:
    text = notes.doing.encode(errors="replace")[: NOTES_BYTES - _HEAD.size]
    memory[_HEAD.size : _HEAD.size + len(text)] = text
    _HEAD.pack_into(memory, 0, notes.written_at, notes.loop_at, notes.busy_since, notes.waits, len(text))


def read_notes(memory: mmap.mmap) -> Notes:
    """A text that is being written may be torn; numbers are whole."""
    written_at, loop_at, busy_since, waits, length = _HEAD.unpack_from(memory, 0)
    text = bytes(memory[_HEAD.size : min(_HEAD.size + length, NOTES_BYTES)])
    return Notes(written_at, loop_at, busy_since, bool(waits), text.decode(errors="replace"))


# one rank ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds and bytes so far, and whether a thread hangs in the kernel's input and output."""

    cpu_s: float
    bytes: int
    in_io: bool

    def is_idle_since(self, before: Usage, elapsed_s: float) -> bool:
        # Less than before: a thread ended in between, and took its seconds with it.
        used = self.cpu_s - before.cpu_s
        return not self.in_io and 0 <= used < IDLE_SHARE * elapsed_s and self.bytes - before.bytes < IDLE_BYTES


def usage_of(pid: int, *, without: set[int]) -> Usage:
    """Of the process's threads but those, and of its children, ended ones too, but this process."""
    ticks, moved, in_io = _ticks_of_children(pid), 0, False
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        if int(thread.name) in without:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread ended
            fields = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[_USED]))
            in_io = in_io or fields[0] == "D"
            lines = (thread / "io").read_text().splitlines()[:2]
            moved += sum(int(line.partition(":")[2]) for line in lines)
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), moved, in_io)


def _ticks_of_children(pid: int) -> int:
    """What an ended child used stays in the sum: its parent has it once it has waited for the child."""
    table = ProcessTable.now()
    below = [table.fields[one] for one in table.tree_of(pid) if one not in (pid, os.getpid()) and one in table.fields]
    used = [fields[_USED] for fields in below]
    waited_for = [fields[_WAITED_FOR] for fields in [*below, table.fields.get(pid, ())]]
    return sum(int(ticks) for span in used + waited_for for ticks in span)


class Observer:
    """Looks at one rank's process and notes. `look` every `LOOK_S`."""

    def __init__(
        self, pid: int, memory: mmap.mmap, own_threads: set[int], timeout_s: float, *, ends_stuck: bool = True
    ) -> None:
        """Args:
        own_threads: of the watch itself; what they use says nothing.
        ends_stuck: whether a rank that does nothing is known to wait for nothing. On a GPU it may wait for that.
        """
        self._pid, self._memory, self._timeout_s = pid, memory, timeout_s
        self._own_threads, self._ends_stuck = own_threads, ends_stuck
        self._held_s = self._idle_s = 0.0
        self._looked_at = time.monotonic()
        self._window: tuple[str, float, Usage] | None = None
        """(what is measured, since when, usage then)"""

    def look(self) -> dict[str, Any]:
        """The report: ``state`` is empty while all is well, else the sentence that says what is wrong."""
        now = time.monotonic()
        elapsed_s, self._looked_at = min(now - self._looked_at, 3 * LOOK_S), now
        notes = read_notes(self._memory)
        held = _state_of(self._pid) in ("T", "t")
        self._held_s = self._held_s + elapsed_s if held else 0.0
        concern = "" if held else self._concern(notes, now)
        self._measure(concern, now)
        working = bool(notes.busy_since) and not notes.waits
        idle = self._ends_stuck and self._idle_s > 0
        return {
            "state": self._sentence(concern),
            "doing": _described(notes, now),
            "waits": notes.waits and not concern,
            "works": (working or bool(concern)) and not idle,
        }

    def _sentence(self, concern: str) -> str:
        if self._held_s >= self._timeout_s:
            return (
                f"its process has been stopped (SIGSTOP or a debugger) for {self._held_s:.0f} s; `kill -CONT "
                f"{self._pid}` in time continues one"
            )
        if self._ends_stuck and concern and self._idle_s >= self._timeout_s:
            return f"it is stuck: for {self._idle_s:.0f} s it used neither the CPU nor the disk, and {concern}"
        return ""

    def _concern(self, notes: Notes, now: float) -> str:
        """Why the rank should be doing something; empty where it may rightly be idle."""
        if now - notes.written_at > STALE_S:
            return "no Python code of it ran: a call keeps Python's lock"
        if now - notes.loop_at > STALE_S:
            return "its event loop stands still"
        if notes.busy_since and not notes.waits:
            return "its work waits for no other rank"
        return ""

    def _measure(self, concern: str, now: float) -> None:
        """Usage is looked at per window, and only where the rank should be doing something."""
        if not concern:
            self._window, self._idle_s = None, 0.0
            return
        if self._window is not None and self._window[0] == concern and now - self._window[1] < WINDOW_S:
            return
        # What the event loop uses (serving weights) says nothing about its work; one that stands still may compute.
        ignored = self._own_threads | ({self._pid} if concern.startswith("its work") else set())
        usage = usage_of(self._pid, without=ignored)
        if self._window is not None and self._window[0] == concern:
            elapsed_s = now - self._window[1]
            idle = usage.is_idle_since(self._window[2], elapsed_s)
            self._idle_s = self._idle_s + min(elapsed_s, 2 * WINDOW_S) if idle else 0.0
        else:
            self._idle_s = 0.0
        self._window = concern, now, usage


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return "X"


def _described(notes: Notes, now: float) -> str:
    since = f"for {now - notes.busy_since:.0f} s " if notes.busy_since else ""
    stands = f"; its event loop last turned {now - notes.loop_at:.0f} s ago" if now - notes.loop_at > STALE_S else ""
    return f"{since}{notes.doing}{stands}"
