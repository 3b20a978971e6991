"""The processes below one of ours, and which of them write their stacks when asked. From /proc: Linux only.

Elsewhere nothing is seen, and no process counts as one that answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
OURS = b"penstock.deploy.cli"
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS = 0, 1, 11, 12
"""Fields of /proc/PID/stat after the name in brackets, see proc(5)."""


@dataclass(frozen=True, slots=True)
class Processes:
    """All of this machine at one moment."""

    fields: Mapping[int, Sequence[str]]
    """pid → what /proc/PID/stat says after the name."""

    @classmethod
    def now(cls) -> Processes:
        found = ((int(entry.name), _stat(entry)) for entry in PROC.glob("[0-9]*"))
        return cls({pid: fields for pid, fields in found if fields})

    def tree_of(self, root: int) -> list[int]:
        """`root` and everything below it, parents first."""
        below = defaultdict(list)
        for pid, fields in self.fields.items():
            below[int(fields[_PARENT])].append(pid)
        found = [root]
        for pid in found:
            found += below[pid]
        return found

    def cpu_s(self, root: int) -> float:
        """Seconds of CPU that the living processes of the tree have used."""
        known = [self.fields[pid] for pid in self.tree_of(root) if pid in self.fields]
        ticks = sum(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]) for fields in known)
        return ticks / os.sysconf("SC_CLK_TCK")

    def is_held(self, root: int) -> bool:
        """Whether SIGSTOP or a debugger holds a role of ours in the tree; boxes may do so to themselves."""
        held = [pid for pid in self.tree_of(root) if self.fields.get(pid, "?")[_STATE] in ("T", "t")]
        return any(_is_ours(pid) for pid in held)


def ask_for_stacks(roots: Iterable[int]) -> list[int]:
    """SIGUSR1 to every role of ours in these trees, a trainer's ranks among them; returns whom.

    A process that has not said that it answers would be ended by the signal: engines, boxes, torchrun itself.
    """
    processes = Processes.now()
    asked = [pid for root in roots for pid in processes.tree_of(root) if _answers(pid)]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return asked


def _answers(pid: int) -> bool:
    with contextlib.suppress(OSError, StopIteration):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (signal.SIGUSR1 - 1) & 1) and _is_ours(pid)
    return False


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return OURS in (PROC / str(pid) / "cmdline").read_bytes()
    return False


def _stat(entry: Path) -> list[str]:
    """Empty where the process has gone. The name in front may hold spaces and brackets itself."""
    try:
        return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
