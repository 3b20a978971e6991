"""CPU seconds of a run's processes, by what they are, as the kernel counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

KINDS = (
    ("run", "supervisor"),
    ("agent", "agent workers"),
    ("sandbox", "sandbox server"),
    ("rollout", "sidecar"),
    ("hf_server", "engine"),
    ("api_server", "engine"),
    ("EngineCore", "engine"),
    ("sglang", "engine"),
    ("train-rank", "trainer"),
    ("train", "trainer"),
    ("redis-server", "redis"),
)
"""A word of the command line → the name in the figures; the first that is found counts."""
MAKERS = ("agent workers", "sandbox server")
"""All other processes below them are boxes."""
BOXES = "boxes"


@dataclass(frozen=True)
class Spent:
    """By one process, in seconds."""

    name: str
    own: float
    ended_children: float
    """Of those that it has waited for, and of theirs"""


class CpuAccount:
    """Looks at the processes below `root`; what one had spent when it was last seen is kept."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[tuple[int, float], Spent] = {}
        """By process id and time of its start: ids are used again."""

    def look(self) -> None:
        for process, name in self._named():
            try:
                times = process.cpu_times()
                spent = Spent(name, times.user + times.system, times.children_user + times.children_system)
                self._seen[process.pid, process.create_time()] = spent
            except psutil.NoSuchProcess:
                continue

    def by_process(self) -> dict[str, float]:
        """Seconds by name. Boxes count once they have ended."""
        found: dict[str, float] = {}
        for spent in self._seen.values():
            found[spent.name] = found.get(spent.name, 0.0) + spent.own
            if spent.name in MAKERS:
                found[BOXES] = found.get(BOXES, 0.0) + spent.ended_children
        return found

    def profiled(self) -> dict[int, str]:
        """Process id → name, of the living ones that run Python."""
        found = {}
        for process, name in self._named():
            try:
                if "python" in process.cmdline()[0] or name == "engine":
                    found[process.pid] = name
            except (psutil.NoSuchProcess, IndexError):
                continue
        return found

    def _named(self) -> Iterator[tuple[psutil.Process, str]]:
        try:
            root = psutil.Process(self._root)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                name = _kind(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if name is not None:
                yield process, name


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
    if words and "redis-server" in words[0]:  # it rewrites its command line into one word
        return "redis"
    if "penstock.deploy.cli" in words:
        words = words[words.index("penstock.deploy.cli") + 1 :][:1]
        return next((name for word, name in KINDS if words and words[0] == word), None)
    program = [word.rpartition(".")[2].rpartition(":")[2] for word in words[:4]]
    return next((name for word, name in KINDS if word in program and name in {"engine", "trainer"}), None)
