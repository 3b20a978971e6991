"""Simulated time: acts that are due, in order of time, and of planning where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class StuckSimulation(Exception):
    """Nothing is due any more and the goal is not reached: the described cluster can make no progress."""


class Clock:
    """Time moves only in `run`. Acts planned for the same moment run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._planned = 0

    def after(self, delay_s: float, act: Act) -> None:
        self._planned += 1
        heapq.heappush(self._due, (self.now_s + max(0.0, delay_s), self._planned, act))

    def run(self, finished: Callable[[], bool]) -> None:
        """Until `finished`. Raises `StuckSimulation` where nothing is left to happen before that."""
        while not finished():
            if not self._due:
                raise StuckSimulation(f"nothing more happens after {self.now_s:.1f} s")
            self.now_s, _, act = heapq.heappop(self._due)
            act()
