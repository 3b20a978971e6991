"""Time that a test moves."""

from __future__ import annotations

from typing import Any


class VirtualClock:
    """`now` in seconds is the test's to change; a deep copy of what holds the clock shares it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualClock:
        return self
