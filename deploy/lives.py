"""What the lives of a run took together: a run that is resumed, or whose supervisor was killed, has several.

    lives.json   one entry per life; that of the living one is rewritten every `WRITE_S` and at its end

A life that was killed counts up to its last entry.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.common import write_atomically

WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class RunLife:
    """One `penstock run`, from its first role to its end."""

    wall_s: float
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Role to how often it was started again."""


@dataclass(frozen=True, slots=True)
class LivesTotal:
    """All lives of a run."""

    lives: int
    wall_s: float
    restarts: Mapping[str, int]


class LivesFile:
    """The lives so far, and the present one, which begins with this object."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._earlier = read_lives(path)
        self._began = clock()
        self._written = -math.inf

    def write(self, restarts: Mapping[str, int]) -> None:
        """Records the present life; returns at once where it was recorded lately and `restarts` may wait."""
        if self._clock() - self._written >= WRITE_S:
            self.total(restarts)

    def total(self, restarts: Mapping[str, int]) -> LivesTotal:
        """Records the present life, and sums up."""
        now = self._clock()
        lives = [*self._earlier, RunLife(now - self._began, dict(restarts))]
        write_atomically(self._path, json.dumps([asdict(life) for life in lives]) + "\n")
        self._written = now
        counts = Counter[str]()
        for life in lives:
            counts.update(life.restarts)
        # `Counter` keeps roles that were never started again: a role of the run is named with its 0.
        return LivesTotal(len(lives), sum(life.wall_s for life in lives), dict(counts))


def read_lives(path: Path) -> list[RunLife]:
    """Empty where the run has none, and where the file cannot be read."""
    try:
        return [RunLife(float(entry["wall_s"]), dict(entry["restarts"])) for entry in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
