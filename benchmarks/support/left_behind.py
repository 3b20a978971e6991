"""What a run left on this machine, found by the processes that it had: other things may run here at the same time."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path

import psutil

from penstock.sandbox import UID_BASE

UIDS_PER_MAKER = 1024
PATIENCE_S = 60.0
"""The kernel and a slow pid 1 take their time with what was killed."""
SHARED_MEMORY = Path("/dev", "shm")
_SECRETS = ("connect.env", "metrics.token", "prometheus-targets.json", "roles.json")


def wait_for_nothing(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def left_behind(root: Path, started: Mapping[int, float], workers: Set[int], ports: Set[int]) -> list[str]:
    """Processes, ports, shared memory, cgroups, mounts and files of the run in the folder `root`, in words.

    `started`: pid → creation time of every process that it had. `workers`: those that made boxes. `ports`: what it
    listened on.
    """
    pids = _living(root, started, workers)
    return [
        *(f"process {pid}: {command}" for pid, command in pids.items()),
        *(f"port {port} of process {pid}" for port, pid in _listening(ports) if pid is None or pid in pids),
        *(f"shared memory {path}" for path in SHARED_MEMORY.glob(f"penstock-{root.name}-*")),
        *(f"cgroup {path}" for path in _cgroups(started)),
        *(f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(root) in line),
        *(f"file {path}" for path in _files(root, started)),
    ]


def _living(root: Path, started: Mapping[int, float], workers: Set[int]) -> dict[int, str]:
    """A zombie is none: pid 1 may reap late."""
    found = {}
    for process in psutil.process_iter(["pid", "create_time", "cmdline", "uids", "status"]):
        seen = process.info
        if seen["status"] == psutil.STATUS_ZOMBIE or seen["uids"] is None:
            continue
        command = " ".join(seen["cmdline"] or ())
        ours = started.get(seen["pid"]) == seen["create_time"] or str(root) in command
        if ours or any(_made_by(worker, seen["uids"].real) for worker in workers):
            found[seen["pid"]] = command[:200]
    return found


def _made_by(worker: int, uid: int) -> bool:
    return 0 <= uid - UID_BASE - worker % 16384 * UIDS_PER_MAKER < UIDS_PER_MAKER


def _listening(ports: Set[int]) -> list[tuple[int, int | None]]:
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return [(each.laddr.port, each.pid) for each in listening if each.laddr.port in ports]


def _cgroups(started: Mapping[int, float]) -> list[Path]:
    """``penstock/OWNER/PID-START-MAKER-SLOT`` in any hierarchy, START in ticks since boot: numbers are given anew."""
    roots = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")]
    paths = [path for root in roots for path in root.glob("penstock/*/*-*/")]
    return [path for path in paths if (made := re.match(r"(\d+)-(\d+)-", path.name)) and _is(*made.groups(), started)]


def _is(pid: str, ticks: str, started: Mapping[int, float]) -> bool:
    """Whether it is that process of the run, not a later one with its number."""
    created = psutil.boot_time() + int(ticks) / os.sysconf("SC_CLK_TCK")
    return abs(started.get(int(pid), 0.0) - created) < 2.0


def _files(root: Path, started: Mapping[int, float]) -> list[Path]:
    boxes = Path(tempfile.gettempdir()).glob("penstock-unsafe-*")
    found = [path for path in boxes if path.name.split("-")[2] in map(str, started)]
    return [*found, *(root / name for name in _SECRETS if (root / name).exists())]
