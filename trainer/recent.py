"""The groups of the latest steps, as a checkpoint remembers them.

A queue that loses its last seconds with its machine may forget steps that a checkpoint holds, committed ones too. From
what the checkpoint remembers the queue is told again which groups those steps were, and none is trained twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

KEEP_S = 60.0
"""A step is remembered for so long after its commit: far more than a Redis with ``appendfsync: everysec`` may lose."""

Groups = Sequence[Sequence[str]]
"""Episode ids by group."""


class RecentBatches:
    """Step → groups, for every step that is not committed or was so only just now."""

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._groups: dict[int, Groups] = {}
        self._commits: list[tuple[float, int]] = []
        """(when, steps below which were committed), oldest first."""

    def add(self, step: int, groups: Groups) -> None:
        self._groups[step] = groups

    def update(self, batches: Mapping[int, Groups]) -> None:
        """Those of the checkpoint that was restored."""
        self._groups |= batches

    def committed(self, step: int) -> None:
        """Steps below `step` are committed."""
        self._commits.append((self._clock(), step))

    def below(self, step: int) -> dict[int, Groups]:
        """What a checkpoint of `step` has to remember."""
        durable_since = self._clock() - self._keep_s
        first = max((below for when, below in self._commits if when <= durable_since), default=0)
        self._commits = [(when, below) for when, below in self._commits if when > durable_since]
        self._groups = {kept: groups for kept, groups in self._groups.items() if kept >= first}
        return {kept: groups for kept, groups in self._groups.items() if kept < step}
