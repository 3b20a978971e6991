"""Processes: ending with the parent, ending a whole group or tree, and what /proc says. Standard library only.

die_with_parent()                      called by a process of ours at its start
guard_command(command)                 wraps a foreign command, see `guard`
kill_group(pid), ProcessTable.now()    whatever a process started
describe_exit(returncode)              an exit status in words
process_identity(), process_has_ended  a process among all that ever ran
environment_without_secrets()          for a process that needs none of ours
uncollected()                          around a process's imports
frozen_start()                         around the work of a process of many requests
DeviceClock                            the time that its devices were its own
cores()                                that this process may run on
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import re
import resource
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MAX_OPEN_FILES = 65536
"""Far above what a process of ours needs; a limit of a billion makes programs slow that close all descriptors."""
SECRETS = re.compile(r"^PENSTOCK_|(?<!^HF)(?<!^HUGGING_FACE_HUB)_(TOKEN|PASSWORD|SECRET|API_KEY)$")
"""Names of variables that a foreign process must not get. A hub token stays: engines read models with it."""
LIFE_VARIABLE = "PENSTOCK_LIFE"
"""Variable with a name that a role's process and all that it starts have, and no other life of the role."""
PARENT_VARIABLE = "PENSTOCK_PARENT"
"""Variable with the pid of the process that starts a role, which may die while Python still loads."""
_PR_SET_PDEATHSIG = 1
_STATE, _PARENT, _START = 0, 1, 19
OWN_TICKS, REAPED_TICKS = (11, 12), (13, 14)
"""Fields of /proc/PID/stat after the name in brackets, see proc(5): user and system time of the process, and of its
descendants that have ended and were waited for."""


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Has the kernel send `signum` to this process when its parent dies, however it dies. Linux only; else a no-op.

    The kernel counts the end of the thread that started this process as the parent's death. A parent that has set
    `PARENT_VARIABLE` may also have died before the call.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the call to prctl
        os.kill(os.getpid(), signum)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off during the imports of a process: none is collected meanwhile, and no later
    collection looks at what was made.

    Modules live as long as the process. torch and transformers make half a million objects; with Python's defaults a
    tenth of their import goes into collections that free next to nothing, and each full one later looks at them again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_start() -> Iterator[None]:
    """Freezes existing objects (modules, tokenizer, template) and makes garbage collections rarer inside the block.

    For a process of many short requests or episodes: each is some hundreds of objects that its end frees by reference
    count; collections find rare cycles only. With Python's defaults they scan all live objects of ten thousand episodes
    again and again, and block the loop.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # New objects before a collection of the youngest; Python's default 700 is less than one episode's turn.
    gc.set_threshold(50_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def environment_without_secrets() -> dict[str, str]:
    """This process's environment without `SECRETS`; what the process itself needs is added by its owner."""
    return {name: value for name, value in os.environ.items() if not SECRETS.search(name)}


def guard_command(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` under `guard`, which ends it and all it started when its owner is gone.

    Start it with ``stdin=PIPE``, held open as long as the command shall live, and ``start_new_session=True``.
    """
    return [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), *command]


def kill_group(pid: int | None, signum: int = signal.SIGKILL) -> None:
    """Sends `signum` to the process group of leader `pid`; a group that is gone, and None, are ignored."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signum)


def describe_exit(returncode: int) -> str:
    """An exit status in words; above 128 it is read as a shell, and `guard`, report a signal."""
    number = -returncode if returncode < 0 else returncode - 128
    if number == signal.SIGKILL:
        return "was killed (signal 9), perhaps by the kernel for want of memory"
    if number in signal.valid_signals():
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit status {returncode}"


def raise_open_files() -> None:
    """Raises the soft limit of open files, meant for programs with few, to the hard one, at most `MAX_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """All processes of this machine at one moment, from /proc; empty if there is none."""

    fields: Mapping[int, Sequence[str]]
    """pid → the fields of /proc/PID/stat after the name."""

    @classmethod
    def now(cls) -> ProcessTable:
        """Reads /proc."""
        stats = ((int(entry.name), _stat(entry)) for entry in PROC.glob("[0-9]*"))
        return cls({pid: fields for pid, fields in stats if fields})

    def tree_of(self, root: int) -> list[int]:
        """`root` and every process below it, parents first."""
        below = defaultdict(list)
        for pid, fields in self.fields.items():
            below[int(fields[_PARENT])].append(pid)
        tree = [root]
        for pid in tree:
            tree += below[pid]
        return tree

    def parent_of(self, pid: int) -> int:
        """Return the parent's pid; 0 if the process is not known."""
        return int(self.fields[pid][_PARENT]) if pid in self.fields else 0

    def cpu_s(self, root: int) -> float:
        """CPU seconds used by the living processes of the tree."""
        known = [self.fields[pid] for pid in self.tree_of(root) if pid in self.fields]
        return sum(map(_cpu_s, known))

    def stopped(self, root: int) -> list[int]:
        """Processes of the tree that SIGSTOP or a debugger holds."""
        return [pid for pid in self.tree_of(root) if self.fields.get(pid, "?")[_STATE] in ("T", "t")]


class DeviceClock:
    """The time of this process's devices: of GPUs by the wall clock; without any it is the CPU time of its process
    tree, by the kernel."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._last = time.monotonic()
        self._cpu_s = 0.0
        """CPU time of the tree at the last call."""
        self._tree, self._tree_at = [os.getpid()], -math.inf

    def elapsed_s(self) -> float:
        """Return the seconds since the last call, summed over devices. Of CPU time the first call returns what was used
        since the process began."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if self._gpus:
            return elapsed * self._gpus
        if now - self._tree_at > 5.0:  # the whole of /proc is read for new children
            self._tree, self._tree_at = ProcessTable.now().tree_of(os.getpid()), now
        stats = (_stat(PROC / str(pid)) for pid in self._tree)
        before, self._cpu_s = self._cpu_s, sum(_cpu_s(stat, OWN_TICKS + REAPED_TICKS) for stat in stats if stat)
        # A process that init has reaped takes its time out of the sum; one of the tree keeps that of its children.
        return max(0.0, self._cpu_s - before)


def handles_signal(pid: int, signum: int) -> bool:
    """Returns True if the process has installed a handler for `signum`; False if it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (signum - 1) & 1)
    return False


def command_line(pid: int) -> bytes:
    """Arguments of a process, separated by NUL; empty if it has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""


def process_identity() -> str:
    """This process in one word that no other process has or had: boot of its machine, namespace, pid and start.

    Elsewhere than on Linux: its pid and a random number, which `process_has_ended` cannot judge.
    """
    place = _namespace()
    if not place:
        return f"{os.getpid()}:{secrets.token_hex(8)}"
    return f"{place}:{os.getpid()}:{_stat(PROC / 'self')[_START]}"


def life_of_process() -> str:
    """Return the name of this life of its role; a process that no head started has one of its own."""
    return os.environ.get(LIFE_VARIABLE) or process_identity()


def process_has_ended(identity: str) -> bool | None:
    """Returns True if the process of that `process_identity` has ended; None for another machine, namespace or boot."""
    place, _, process = identity.rpartition(":")
    place, _, pid = place.rpartition(":")
    if not place or place != _namespace():
        return None
    fields = _stat(PROC / pid)
    return not fields or fields[_START] != process or fields[_STATE] in ("Z", "X")


def _namespace() -> str:
    """The boot of this machine and the namespace of its pids; empty elsewhere than on Linux."""
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{(PROC / 'self/ns/pid').stat().st_ino}"
    return ""


def _cpu_s(stat: Sequence[str], ticks: Sequence[int] = OWN_TICKS) -> float:
    """User and system time of a process from its `_stat`."""
    return sum(int(stat[one]) for one in ticks) / os.sysconf("SC_CLK_TCK")


def _stat(entry: Path) -> list[str]:
    """Empty where the process has ended. The name in front may hold spaces and brackets itself."""
    try:
        return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def cores() -> int:
    """Returns the number of cores: the container's share of the CPU, or the process's affinity, if that is less."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(mine, math.ceil(int(quota) / int(period))))  # "max": no quota
    return mine
