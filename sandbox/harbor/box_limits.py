"""Limits of a box that show in what a task's scripts wrote, and the setting that raises each."""

from __future__ import annotations

import itertools
import re

from penstock.sandbox.protocol import RunResult

KILLED = (137, -9)
"""Exit status of a shell whose command got SIGKILL, and of a program that got it itself."""
PROCESSES = "the box has all the processes of sandbox.pids: raise sandbox.pids"
MEMORY = (
    "the box's memory may be used up: raise sandbox.memory_mb, or the task's environment.memory_mb where that is set"
)
DISK = (
    "the box's disk is full: raise sandbox.tmp_mb (bwrap), or the task's environment.storage_mb or"
    " sandbox.own_limits.storage_mb (docker)"
)
CPU = "a process used up its CPU time: raise sandbox.cpu_s"
_SIGNS = {
    PROCESSES: re.compile(r"fork\b.*Resource temporarily unavailable|[Cc]an(?:no|')t (?:fork|start new thread)"),
    DISK: re.compile("No space left on device|the box's disk is full"),
    MEMORY: re.compile(r"^(?:.*[: ])?Killed\b|Cannot allocate memory|MemoryError", re.MULTILINE),
}


def find_limit(output: str, result: RunResult | None = None) -> str:
    """Return the limit that a failed script met, with the setting to raise; empty if nothing shows one."""
    for limit, sign in _SIGNS.items():
        if sign.search(output):
            return limit
    if result is None:
        return ""
    if result.limit == "memory" or result.exit_code in KILLED:
        return MEMORY
    return CPU if result.limit == "cpu" and result.exit_code is None else ""


def without_repeats(output: str) -> str:
    """Return `output` with equal neighbouring lines written once: a shell that cannot fork repeats its complaint.

    The first line may lack its beginning, as the end of a longer output does.
    """
    lines = [line for line, _ in itertools.groupby(output.splitlines())]
    is_rest = len(lines) > 1 and lines[1].endswith(lines[0])
    return "\n".join(lines[1:] if is_rest else lines)
