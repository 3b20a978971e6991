"""The result of a check, and the resources of this machine or container."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do if it is not ok, or if it only `warns`."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    skipped: bool = False
    """The check could not be made here, or does not matter; `found` has the reason."""
    warns: bool = False
    """The run can continue with it, and would do better without."""

    @property
    def verdict(self) -> str:
        """``ok``, ``warn``, ``skip`` or ``FAIL``"""
        if not self.ok:
            return "FAIL"
        return "skip" if self.skipped else "warn" if self.warns else "ok"


def refused(name: str, error: Exception, fix: str) -> Check:
    """A failed check of what `error` says. A missing package is fixed by its own command, anything else by `fix`."""
    found, install, command = str(error).partition(": pip install ")
    return Check(name, False, found, f"pip install {command}" if install else fix)


def skipped(name: str, why: str) -> Check:
    return Check(name, True, why, skipped=True)


def warning(name: str, detail: str, fix: str) -> Check:
    return Check(name, True, detail, fix, warns=True)


def memory_bytes() -> int:
    """Return the memory of the machine, or of our cgroup if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup_v1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = (_number(file) for file in (Path("/sys/fs/cgroup/memory.max"), cgroup_v1))
    return min([machine, *(limit for limit in limits if limit)])


def available_bytes() -> int:
    """Not taken by other programs now; caches count as free."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        return min(int(free.split()[1]) << 10, memory_bytes())
    return memory_bytes()


def _number(file: Path) -> int:
    """0 if the file is missing or has no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0


def human(size: float) -> str:
    """Bytes for people: 512 B, 3.2 MiB, 1.5 TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
