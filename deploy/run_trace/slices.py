"""Intervals that nest, and the lanes that they are drawn in: what overlaps without nesting needs another lane."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    name: str
    start_s: float
    """By some clock that all roles share, such as Unix time."""
    end_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    children: Sequence[Slice] = ()
    """Within this one as far as they can be; in any order."""

    def within(self, start_s: float, end_s: float) -> Slice:
        """Cut to these bounds."""
        start = min(max(self.start_s, start_s), end_s)
        return replace(self, start_s=start, end_s=min(max(self.end_s, start), end_s))


@dataclass(frozen=True, slots=True)
class Process:
    """One role."""

    name: str
    slices: Sequence[Slice]
    lane: str = "lane"
    """What a lane of it is called."""
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """name → (seconds, value)"""


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Each lane in order and without overlap; so are the children of each slice. Nothing is lost: a child that
    overlaps its neighbour goes to a lane of its own."""
    found: list[list[Slice]] = []
    waiting = [(one.start_s, number, one) for number, one in enumerate(slices)]
    heapq.heapify(waiting)
    number = len(waiting)
    while waiting:
        _, _, one = heapq.heappop(waiting)
        kept, beside = _nested(one)
        lane = next((lane for lane in found if lane[-1].end_s <= kept.start_s), None)
        if lane is None:
            found.append(lane := [])
        lane.append(kept)
        for other in beside:  # none starts before `one`: the heap's order holds
            number += 1
            heapq.heappush(waiting, (other.start_s, number, other))
    return found


def _nested(one: Slice) -> tuple[Slice, list[Slice]]:
    """The slice with those children, in order, that do not overlap one another; and the others."""
    kept: list[Slice] = []
    beside: list[Slice] = []
    end_s = one.start_s
    for child in sorted(one.children, key=lambda child: (child.start_s, -child.end_s)):
        cut = child.within(one.start_s, one.end_s)
        if cut.start_s < end_s:
            beside.append(cut)
            continue
        inner, more = _nested(cut)
        kept.append(inner)
        beside += more
        end_s = inner.end_s
    return replace(one, children=kept), beside
