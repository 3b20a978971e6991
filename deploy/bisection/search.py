"""Delta debugging: the smallest set of items whose removal undoes a fault.

    a set that undoes it ──► its parts, two at first: does one alone undo it? ──────► continue inside that part
                                  │ none                                                       ▲
                                  ▼                                                            │
                             the set without one of its parts: does that undo it? ──► continue inside the rest
                                  │ none
                                  ▼
                             twice as many parts, until each is one item: all of them are needed

Zeller & Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input", section 3 (`ddmin`). One item of n is
isolated in at most 2 log2 n tries, k items in the order of k · log n where they lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


class OutOfTries(Exception):
    """The tries of a search are used up."""


@dataclass(frozen=True, slots=True)
class SmallestSet(Generic[T]):
    items: tuple[T, ...]
    """Their removal undoes the fault."""
    is_minimal: bool
    """Each item is needed: the removal of all others does not undo it. False: the tries were used up before that."""


def smallest_set(items: Sequence[T], undoes: Callable[[Sequence[T]], bool]) -> SmallestSet[T]:
    """Return a smallest set among `items`, whose removal as a whole undoes the fault.

    `undoes` says whether the removal of a set does. It may raise `OutOfTries`: the set so far is then the result.
    """
    current, count = tuple(items), 2
    try:
        while len(current) > 1:
            smaller = _smaller(current, count, undoes)
            if smaller is not None:
                current, count = smaller
            elif count == len(current):
                break
            else:
                count = min(2 * count, len(current))
    except OutOfTries:
        return SmallestSet(current, False)
    return SmallestSet(current, True)


def _smaller(
    items: tuple[T, ...], count: int, undoes: Callable[[Sequence[T]], bool]
) -> tuple[tuple[T, ...], int] | None:
    """Return a smaller set that undoes the fault, and the parts to try next; None if none of `count` parts can go."""
    edges = [len(items) * number // count for number in range(count + 1)]
    bounds = list(pairwise(edges))
    for start, end in bounds:
        if undoes(items[start:end]):
            return items[start:end], 2
    for start, end in bounds if count > 2 else ():
        rest = items[:start] + items[end:]
        if undoes(rest):
            return rest, min(max(count - 1, 2), len(rest))
    return None
