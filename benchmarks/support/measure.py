"""Measurements and their summaries: quantiles and medians, peak memory of a process tree (from /proc), the machine."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import redis.asyncio as aioredis


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_of(rounds: Sequence[Sequence[float]], share: float) -> float:
    """Median over the rounds of each round's quantile."""
    return median(quantile(samples, share) for samples in rounds)


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


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


_PROBE_BYTES = 128 << 20
_BACKGROUND = ("lazyfree_pending_objects", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
SETTLE_TIMEOUT_S = 120.0


async def machine(client: aioredis.Redis) -> dict[str, Any]:
    """Cores, versions, settings of the redis-server and how fast the disk under its append-only file is."""
    settings = await client.config_get("append*")
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "redis_server": (await client.info("server"))["redis_version"],
        "redis_py": version("redis"),
        "appendonly": settings["appendonly"],
        "appendfsync": settings["appendfsync"],
        "disk_mb_per_s": disk_mb_per_s(),
    }


async def settled(client: aioredis.Redis, data: Path) -> None:
    """Wait until Redis has freed what it was told to, and what it has written is on the disk.

    Else the side that comes next would wait for the writing of the one before.
    """
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while await _busy(client):  # noqa: ASYNC110 - another process: there is no event
            await asyncio.sleep(0.02)
        await asyncio.to_thread(_sync, data)


async def _busy(client: aioredis.Redis) -> bool:
    info = await client.info()
    return any(int(info[name]) for name in _BACKGROUND)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*.aof"):
        with suppress(FileNotFoundError), file.open("rb") as open_file:  # a rewrite has taken its place
            os.fsync(open_file.fileno())


def disk_mb_per_s() -> float:
    """Writing 128 MiB to a temporary file, to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return round(_PROBE_BYTES / 1e6 / (time.perf_counter() - began))


def processor() -> dict[str, Any]:
    """Cores, their model and how busy they were when this was asked."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": model or platform.processor(),
        "load_1m": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
