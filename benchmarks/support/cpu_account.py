"""CPU seconds of a run's processes, by what they are, as the kernel counts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.support.reaper import FILE

KINDS = (
    ("run", "supervisor"),
    ("agent", "agent workers"),
    ("sandbox", "sandbox server"),
    ("rollout", "sidecar"),
    ("engines.hf.server", "engine"),
    ("api_server", "engine"),
    ("EngineCore", "engine"),
    ("sglang", "engine"),
    ("train-rank", "trainer"),
    ("train", "trainer"),
    ("redis-server", "redis"),
)
"""A word of the command line → the name in the figures; the first that is found counts."""
REAPER = "reaper"
BOXES = "boxes"
"""The zygote too, which forks the boxes of a worker and waits for each: while it lives it alone has their account."""
MAKERS = ("agent workers", "sandbox server", REAPER, BOXES)
"""All other processes below them are boxes. Those whose own parent has ended before them fall to the reaper."""
SETTINGS, ZYGOTE_WORDS = 5, 8
"""Of a zygote's command line: which word its settings are, and how many there are."""
HELPERS = "{} helpers"
"""Other processes below a named one: they look something up, compile, inspect a model, and end."""
Key = tuple[int, float]
"""Process id and time of its start: ids are used again."""


@dataclass(frozen=True)
class Spent:
    """By one process, in seconds."""

    name: str
    parent: int | None
    """Process id of the nearest named process above it"""
    own: float
    ended_children: float
    """Of those that it has waited for, and of theirs"""
    look: int
    """The last one that has seen it"""


class CpuAccount:
    """Looks at the processes below `root`; what one had spent when it was last seen is kept."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[Key, Spent] = {}
        self._looks = 0

    def look(self) -> None:
        """Between the end of a named process and its parent's wait for it, helpers come out too low by its seconds."""
        self._looks += 1
        family = list(self._named())
        named = {process.pid: name for process, name in family}
        for process, name in family:
            try:
                times = process.cpu_times()
                own, ended = times.user + times.system, times.children_user + times.children_system
                key = process.pid, process.create_time()
                self._seen[key] = Spent(name, _parent(process, named), own, ended, self._looks)
            except psutil.NoSuchProcess:
                continue

    def by_process(self) -> dict[str, float]:
        """Seconds by name. Boxes and helpers count once they have ended."""
        found: dict[str, float] = {}
        for (pid, _), spent in self._seen.items():
            found[spent.name] = found.get(spent.name, 0.0) + spent.own
            name = BOXES if spent.name in MAKERS else HELPERS.format(spent.name)
            others = max(0.0, spent.ended_children - self._ended_below(pid, spent.look))
            if others or name == BOXES:
                found[name] = found.get(name, 0.0) + others
        return found

    def _ended_below(self, pid: int, look: int) -> float:
        """Seconds of named processes that had ended when the process `pid` was looked at: they count by themselves."""
        below = [(key[0], one) for key, one in self._seen.items() if one.parent == pid and one.look < look]
        return sum(one.own + one.ended_children + self._ended_with(child, one.look) for child, one in below)

    def _ended_with(self, pid: int, look: int) -> float:
        """Seconds of named processes that lived when the process `pid` was last seen: it has waited for them since."""
        below = [(key[0], one) for key, one in self._seen.items() if one.parent == pid and one.look == look]
        return sum(one.own + one.ended_children + self._ended_with(child, look) for child, one in below)

    def _named(self) -> Iterator[tuple[psutil.Process, str]]:
        try:
            root = psutil.Process(self._root)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        zygotes = set[int]()
        for process in family:
            try:
                name = _kind(process.cmdline())
                if name == BOXES:
                    zygotes.add(process.pid)
                    name = None if process.ppid() in zygotes else name  # a fork has its zygote's command line
            except psutil.NoSuchProcess:
                continue
            if name is not None:
                yield process, name


def _parent(process: psutil.Process, named: Mapping[int, str]) -> int | None:
    return next((one.pid for one in process.parents() if one.pid in named), None)


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a living process and all below it, waited-for children included; 0 where it has ended.

    A child that ends while this is read may be missed, or counted twice: by what it had spent.
    """
    total = 0.0
    try:
        parent = psutil.Process(root)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _kind(words: Sequence[str]) -> str | None:
    """None of a box's process, and of a helper that lives for a moment."""
    if len(words) > 2 and Path(words[2]) == FILE:
        return REAPER
    if _is_zygote(words):
        return BOXES
    if words and "redis-server" in words[0]:  # it rewrites its command line into one word
        return "redis"
    if "penstock.deploy.cli" in words:
        words = words[words.index("penstock.deploy.cli") + 1 :][:1]
        return next((name for word, name in KINDS if words and words[0] == word), None)
    program = [word.rpartition(".")[2].rpartition(":")[2] for word in words[:4]]
    return next((name for word, name in KINDS if word in program and name in {"engine", "trainer"}), None)


def _is_zygote(words: Sequence[str]) -> bool:
    """By its settings, which name its worker (`penstock.sandbox.bundle.zygote_command`); its forks look alike."""
    return len(words) == ZYGOTE_WORDS and words[1] == "-I" and '"worker": ' in words[SETTINGS]
