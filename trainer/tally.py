"""Sums over tokens and episodes that do not depend on how they were split over packs or in which order they came."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.trainer.ranks import Ranks, merge_by_name


class Tally:
    """Collects values by name on one rank; `reduce` adds up the ranks.

    Values are kept until the end and summed by `math.fsum`, which rounds once: the same values give the same bits in
    any order and any split.
    """

    def __init__(self) -> None:
        self._values: defaultdict[str, list[NDArray[np.float64]]] = defaultdict(list)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, values: ArrayLike) -> None:
        """Values to be averaged."""
        self._values[name].append(np.atleast_1d(np.asarray(values, dtype=np.float64)))

    def count(self, name: str, number: int) -> None:
        """A number to be added up."""
        self._counts[name] += int(number)

    def reduce(self, ranks: Ranks) -> Totals:
        """A collective."""
        sums = {name: _summary(np.concatenate(parts)) for name, parts in self._values.items()}
        gathered = ranks.gather({"sums": sums, "counts": dict(self._counts)})
        return Totals(gathered)


class Totals:
    """The tallies of all ranks, added up."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self._sums = merge_by_name([part["sums"] for part in parts])
        self.counts: dict[str, int] = {
            name: sum(values) for name, values in merge_by_name([part["counts"] for part in parts]).items()
        }

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._sums if name.startswith(prefix)]

    def number(self, name: str) -> int:
        return sum(int(count) for _, count, _ in self._sums.get(name, []))

    def mean(self, name: str) -> float:
        """0.0 where no value came."""
        total = _fsum([part[0] for part in self._sums.get(name, [])])
        return total / max(1, self.number(name))

    def max(self, name: str) -> float:
        return max((part[2] for part in self._sums.get(name, []) if part[1]), default=0.0)


def _summary(values: NDArray[np.float64]) -> tuple[float, int, float]:
    """(sum, number, largest)"""
    return _fsum(values.tolist()), len(values), float(values.max(initial=-math.inf)) if len(values) else 0.0


def _fsum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond float64
        return math.nan
