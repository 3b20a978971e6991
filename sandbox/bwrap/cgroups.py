"""Control groups of boxes, version 1 and 2: memory, processes and CPU of a whole box, whatever it forks.

    <hierarchy>/penstock/<owner>/<pid>-<start>-<maker>-<slot>      pid, start: of the process that made it

Root uses the machine's hierarchy. An ordinary user, and root in a container, use the group that they are in, or one
above it, where version 2 is delegated to them (``systemd-run --user --scope -p Delegate=yes``).

The name says who made a group and whether that process still lives, so the next start of the same owner can clear
away what a killed one left. Only groups under ``penstock/`` are ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.inside.driver import oom_kills
from penstock.sandbox.owner import is_gone, this_process

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_CONTROLLERS = ("memory", "pids", "cpu")
_ATTEMPTS = 5
_SERIAL = itertools.count()


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroups of one box: one directory (version 2) or one per hierarchy (version 1)."""

    directories: tuple[Path, ...]
    oom_file: Path
    """Holds the line ``oom_kill N``."""
    version: int
    clean_cache: bool = False

    @property
    def join_files(self) -> list[str]:
        """A process of one thread enters by writing 0, or its pid, to each.

        In version 1 by ``tasks``: a whole process that enters by ``cgroup.procs`` holds up every fork and exit of the
        machine until the kernel has seen all its processors idle, some milliseconds each time. Version 2 has no
        other file for processes that share their group.
        """
        file = "tasks" if self.version == 1 else "cgroup.procs"
        return [str(directory / file) for directory in self.directories]

    def oom_kills(self) -> int:
        """Processes of this box that the kernel ended for want of memory, so far."""
        return oom_kills([self.oom_file]) or 0

    def kill(self) -> None:
        for directory in self.directories:
            for pid in _read_pids(directory):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def empty_cache(self) -> None:
        """Drop pages of files, names and inodes that this box was the first to look up: the next one finds none of it.

        Takes some milliseconds, and the end of the box's last process before it. Version 2 can do it since Linux 5.19.
        """
        file, amount = ("memory.force_empty", "0") if self.version == 1 else ("memory.reclaim", "1T")
        with contextlib.suppress(OSError):  # EAGAIN: less than the amount was there
            _write(self.directories[0] / file, amount, optional=True)

    def remove(self) -> bool:
        """True once nothing is left; False while members still exit (call again a little later)."""
        if self.clean_cache:
            self.empty_cache()
        return all([_remove_directory(directory) for directory in self.directories])


class CgroupMaker:
    """Makes the groups of one owner's boxes under the parents in `parents`."""

    def __init__(self, version: int, parents: tuple[Path, ...], config: SandboxConfig) -> None:
        self.version = version
        self.parents = parents
        self.config = config
        self.prefix = f"{this_process()}-{next(_SERIAL)}"

    def make(self, slot: int, clean_cache: bool = False) -> Cgroup:
        """Raises `OSError` where the hierarchy cannot be written or is full."""
        directories = tuple(parent / f"{self.prefix}-{slot}" for parent in self.parents)
        for attempt in range(_ATTEMPTS):
            try:
                for parent in self.parents:
                    if self.version == 2:
                        _delegate(parent)
                    elif attempt > 0:  # version 1 has nothing to hand down: parents that exist are ready
                        parent.mkdir(parents=True, exist_ok=True)
                for directory in directories:
                    directory.mkdir(exist_ok=True)
                break
            except FileNotFoundError:  # another process removed the empty parents in between
                if attempt == _ATTEMPTS - 1:
                    raise
        oom_file = directories[0] / ("memory.events" if self.version == 2 else "memory.oom_control")
        self._limit(directories)
        return Cgroup(directories, oom_file, self.version, clean_cache)

    @property
    def limits_cpu(self) -> bool:
        """Version 2 may be delegated without it."""
        return self.version == 1 or "cpu" in _controllers(self.parents[0].parent.parent)

    def _limit(self, directories: tuple[Path, ...]) -> None:
        memory, processes, cpu = directories if self.version == 1 else directories * 3
        memory_bytes, quota_us = str(self.config.memory_mb << 20), str(int(self.config.cpus * _PERIOD_US))
        _write(processes / "pids.max", str(self.config.pids))
        if self.version == 2:
            _write(memory / "memory.max", memory_bytes)
            _write(memory / "memory.swap.max", "0", optional=True)
            if self.limits_cpu:
                _write(cpu / "cpu.max", f"{quota_us} {_PERIOD_US}")
            return
        _write(memory / "memory.limit_in_bytes", memory_bytes)
        _write(memory / "memory.memsw.limit_in_bytes", memory_bytes, optional=True)
        # buffers of sockets, of UDP too, count against nothing else in version 1
        _write(memory / "memory.kmem.tcp.limit_in_bytes", memory_bytes, optional=True)
        _write(cpu / "cpu.cfs_quota_us", quota_us)

    def reap(self) -> int:
        """Clear away groups of this owner whose maker is gone; returns how many boxes that were."""
        names = {path.name for parent in self.parents for path in _subdirectories(parent)}
        leftovers = {name for name in names if name[0].isdigit() and is_gone(name)}
        for name in leftovers:
            groups = tuple(parent / name for parent in self.parents)
            leftover = Cgroup(groups, groups[0] / "memory.events", self.version)
            deadline = time.monotonic() + 5.0
            while not leftover.remove() and time.monotonic() < deadline:
                leftover.kill()
                time.sleep(0.01)  # its processes need a moment to end; at a backend's start, when no session waits
        return len(leftovers)

    def close(self) -> None:
        """Remove the owner's own directories where no other process has boxes in them."""
        for parent in self.parents:
            _remove_directory(parent)
            _remove_directory(parent.parent)


def open_cgroups(
    owner: str, config: SandboxConfig, root: Path = ROOT, membership: str | None = None
) -> tuple[CgroupMaker | None, str]:
    """The maker for `owner`, or None and the reason in words. `membership`: this process's /proc/self/cgroup."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", owner).strip(".") or "run"
    if not (root / "cgroup.controllers").exists():
        if not all((root / controller).is_dir() for controller in _CONTROLLERS):
            return None, f"no cgroup hierarchy with {', '.join(_CONTROLLERS)} under {root}"
        return _proven(CgroupMaker(1, tuple(root / c / "penstock" / name for c in _CONTROLLERS), config))
    reason = f"no cgroup below {root} is delegated to uid {os.geteuid()}"
    for group in _usable(root, membership):
        maker, reason = _proven(CgroupMaker(2, (group / "penstock" / name,), config))
        if maker is not None:
            return maker, ""
    return None, reason


def remove_abandoned_cgroups(root: Path = ROOT, membership: str | None = None) -> int:
    """Clears away the groups of boxes whose process is gone, whichever run's they are. Returns the number of boxes."""
    version, trees = 1, [tuple(root / controller / "penstock" for controller in _CONTROLLERS)]
    if (root / "cgroup.controllers").exists():
        version, trees = 2, [(group / "penstock",) for group in _usable(root, membership)]
    boxes = 0
    for tree in trees:
        for owner in {path.name for parent in tree for path in _subdirectories(parent)}:
            maker = CgroupMaker(version, tuple(parent / owner for parent in tree), SandboxConfig())
            boxes += maker.reap()
            maker.close()
    return boxes


def _proven(maker: CgroupMaker) -> tuple[CgroupMaker | None, str]:
    """A box's first process enters its group by itself: the right to make groups is not the right to enter them."""
    try:
        cgroup = maker.make(0)
        enter = ["/bin/sh", "-c", 'for file; do echo $$ > "$file" || exit; done', "box", *cgroup.join_files]
        entered = subprocess.run(enter, capture_output=True, text=True, timeout=20, check=False)
        cgroup.remove()
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"cgroups are not writable ({error})"
    maker.close()
    if entered.returncode != 0:
        return None, f"cgroups cannot be entered ({entered.stderr.strip()})"
    return maker, ""


def _usable(root: Path, membership: str | None) -> Iterator[Path]:
    """Groups below which this process may make others, as far as rights and controllers tell; nearest first."""
    if membership is None:
        membership = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "/").strip("/")
    group = root / own
    if ".." in group.parts or not group.is_dir():  # as another namespace sees it
        group = root
    above = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    for candidate in [root, *above[:-1]] if os.geteuid() == 0 else above:
        if os.access(candidate / "cgroup.procs", os.W_OK) and _controllers(candidate) >= {"memory", "pids"}:
            yield candidate


def _controllers(group: Path) -> set[str]:
    try:
        return set((group / "cgroup.controllers").read_text(encoding="ascii").split())
    except OSError:
        return set()


def _delegate(owner: Path) -> None:
    """Version 2: every level must hand the controllers down before its children can use them."""
    top = owner.parent.parent
    controllers = " ".join(f"+{name}" for name in _CONTROLLERS if name in _controllers(top))
    for level in (top, owner.parent, owner):
        level.mkdir(exist_ok=True)
        _hand_down(level, controllers)


def _hand_down(level: Path, controllers: str) -> None:
    """Moves the processes `` first/`` first: a group has processes or limited subgroups, not both.

    Raises `OSError`, EBUSY if processes are born in the group faster than they can be moved.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _write(level / "cgroup.subtree_control", controllers)
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == _ATTEMPTS - 1:
                raise
        members = level / "penstock-members"
        members.mkdir(exist_ok=True)
        for pid in _read_pids(level):
            with contextlib.suppress(ProcessLookupError):
                _write(members / "cgroup.procs", str(pid))
    return None


def _subdirectories(parent: Path) -> Iterator[Path]:
    try:
        entries = list(parent.iterdir())
    except FileNotFoundError:  # none yet, or another process of this owner removed the empty folder just now
        return
    yield from (path for path in entries if path.is_dir())


def _read_pids(directory: Path) -> list[int]:
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_text(encoding="ascii").split()]
    except OSError:
        return []


def _remove_directory(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(path: Path, value: str, optional: bool = False) -> None:
    if optional and not path.exists():
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, value.encode("ascii"))
    finally:
        os.close(fd)
