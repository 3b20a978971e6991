"""Rounds of several sides in turn, and what they come to."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from benchmarks.support.measure import microseconds, peaks_mb, quantile, reset_peaks
from benchmarks.support.sides import QueuePlan, QueueSide, Round

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One side under one plan: all its rounds, and the highest peak of each of its processes."""

    side: str
    plan: QueuePlan
    payload_bytes: int
    rounds: Sequence[Round]
    peaks: dict[str, float]

    @property
    def mb_per_s(self) -> float:
        """Median over the rounds; a payload counts once although it goes in and out."""
        return self.plan.count * self.payload_bytes / 1e6 / median(one.total_s for one in self.rounds)

    def figures(self) -> dict[str, Any]:
        puts = [latency for one in self.rounds for latency in one.put_s]
        return {
            "mb_per_s": round(self.mb_per_s, 1),
            "payloads_per_s": round(self.plan.count / median(one.total_s for one in self.rounds), 1),
            "put_p50_us": microseconds(quantile(puts, 0.5)),
            "put_p99_us": microseconds(quantile(puts, 0.99)),
            "take_us": microseconds(median(one.consume_s for one in self.rounds) / self.plan.count),
            "peak_rss_mb": self.peaks,
            "peak_rss_mb_all": round(sum(self.peaks.values()), 1),
        }


async def compare(
    sides: Sequence[QueueSide], plan: QueuePlan, rounds: int, payload_bytes: int, settle: Callable[[], Awaitable[None]]
) -> dict[str, Cell]:
    """One unmeasured round, then `rounds`: in each every side once, in changing order, so that what disturbs the
    machine for some seconds disturbs all alike. `settle` ends what the side before has left running."""
    taken: dict[str, list[Round]] = {side.name: [] for side in sides}
    peaks: dict[str, dict[str, float]] = {side.name: {} for side in sides}
    for number in range(-1, rounds):
        for side in in_turn(sides, number):
            await settle()
            reset_peaks(side.pids())
            one = await side.round(plan)
            if number >= 0:
                taken[side.name].append(one)
                merge_peaks(peaks[side.name], peaks_mb(side.pids()))
    cells = {name: Cell(name, plan, payload_bytes, taken[name], peaks[name]) for name in taken}
    for cell in cells.values():
        say(f"{plan.size}, {plan.producers} producers, {cell.side}: {cell.mb_per_s:.0f} MB/s")
    return cells


def ratio(cells: dict[str, Cell], over: str, under: str) -> float:
    """Throughput of one side over another's, medians of the rounds."""
    return round(cells[over].mb_per_s / cells[under].mb_per_s, 3)


def in_turn(sides: Sequence[T], number: int) -> list[T]:
    """Each is first in one round of as many, and backwards every second time: none always follows the same."""
    first = number // 2 % len(sides)
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if number % 2 else order


def merge_peaks(highest: dict[str, float], now: dict[str, float]) -> None:
    for process, peak in now.items():
        highest[process] = max(peak, highest.get(process, 0.0))


def say(line: str) -> None:
    """Progress, for a person who waits; stdout is for the result."""
    print(line, file=sys.stderr, flush=True)
