"""Peak resident memory of a process and all that descend from it, from /proc (Linux; elsewhere nothing is reported)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")


def family(pid: int) -> list[int]:
    """`pid` and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:
        found.extend(sorted(children.get(member, [])))
    return found


def reset_peaks(pids: Sequence[int]) -> None:
    """Let each peak start anew from what is resident now. Where the kernel forbids it, peaks are since the start."""
    for pid in pids:
        try:
            (PROC / str(pid) / "clear_refs").write_text("5")
        except OSError:
            continue  # the process has ended, or the kernel forbids it: `can_reset` tells the reader which


def can_reset() -> bool:
    """Whether peaks can be told apart by round."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peaks_mb(pids: Sequence[int]) -> dict[str, float]:
    """Process → high-water mark of its resident memory in MB, shared memory included; the ended are left out."""
    peaks: dict[str, float] = {}
    for pid in pids:
        status = _read(pid, "status")
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            peaks[_free_name(_name(pid, status), peaks)] = round(int(found[1]) * 1024 / 1e6, 1)
    return peaks


def _parents() -> list[tuple[int, int]]:
    pairs = []
    for folder in PROC.glob("[0-9]*"):
        if found := re.search(r"^PPid:\s+(\d+)", _read(int(folder.name), "status"), re.MULTILINE):
            pairs.append((int(folder.name), int(found[1])))
    return pairs


def _read(pid: int, file: str) -> str:
    try:
        return (PROC / str(pid) / file).read_text(errors="replace")
    except OSError:
        return ""


def _name(pid: int, status: str) -> str:
    """What the process calls itself: ``redis-server``, ``ray::SimpleStorageUnit``; a Python program by its file."""
    words = _read(pid, "cmdline").replace("\0", " ").split()
    if words and words[0].startswith("ray::"):
        return words[0]
    found = re.search(r"^Name:\s+(.*)$", status, re.MULTILINE)
    program = found[1] if found else str(pid)
    if not program.startswith("python"):
        return program
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return next((Path(word).stem for word in words if word.endswith(".py")), program)


def _free_name(name: str, taken: dict[str, float]) -> str:
    """``name``, ``name 2``, ``name 3`` …"""
    number = 1
    while (free := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return free
