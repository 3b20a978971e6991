"""Pauses between attempts: exponential, bounded, with jitter.

The loops that use this differ in what they retry, until when, and what they report; they share the arithmetic alone.

    BACKOFF = Backoff(0.05, 1.0)
    await asyncio.sleep(BACKOFF.pause_s(failures))        the number of failures is known

    pauses = BACKOFF.pauses()                             it is counted here
    while not await done():
        await pauses.sleep()
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """``first_s * factor ** (failures - 1)``, at most `longest_s`, times a random factor from `jitter`."""

    first_s: float
    longest_s: float = math.inf
    factor: float = 2.0
    jitter: tuple[float, float] = (1.0, 1.0)
    """Bounds of the random factor; equal bounds draw nothing. It spreads clients that failed at the same moment."""

    def pause_s(self, failures: int, *, at_least_s: float | None = None, rng: random.Random | None = None) -> float:
        """Seconds to wait after that many failures in a row; 1 and less give the first pause.

        Args:
            at_least_s: what the service asked for (Retry-After); honoured up to `longest_s`.
            rng: source of the jitter; None: the module `random`.
        """
        pause_s = min(self.first_s * self.factor ** min(max(failures - 1, 0), 64), self.longest_s)
        low, high = self.jitter
        if low != high:
            pause_s *= (rng.uniform if rng is not None else random.uniform)(low, high)
        elif low != 1.0:
            pause_s *= low
        return max(pause_s, min(at_least_s or 0.0, self.longest_s))

    def pauses(self, rng: random.Random | None = None) -> Pauses:
        """A counter of failures that starts at none."""
        return Pauses(self, rng)


class Pauses:
    """Growing pauses of one loop. Not shared between tasks."""

    def __init__(self, backoff: Backoff, rng: random.Random | None = None) -> None:
        self._backoff = backoff
        self._rng = rng
        self.failures = 0
        """Failures since the last `reset`."""

    def next_s(self) -> float:
        """Counts a failure and returns the seconds to wait after it."""
        self.failures += 1
        return self._backoff.pause_s(self.failures, rng=self._rng)

    async def sleep(self, at_most_s: float = math.inf) -> float:
        """Counts a failure, sleeps, at most `at_most_s` (the time left to a deadline); returns the seconds slept."""
        pause_s = max(0.0, min(self.next_s(), at_most_s))
        await asyncio.sleep(pause_s)
        return pause_s

    def reset(self) -> None:
        """Starts again at the first pause; called on success."""
        self.failures = 0


async def retry(
    work: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    retries: int,
    on: type[Exception] | tuple[type[Exception], ...],
    at_least_s: Callable[[Any], float | None] = lambda _: None,
) -> T:
    """Calls `work` until it succeeds, at most ``1 + retries`` times.

    Errors of other types than `on` propagate at once; after the last attempt so does its own error.

    Args:
        at_least_s: maps an error to the pause that the service asked for.
    """
    for failures in range(1, retries + 1):
        try:
            return await work()
        except on as error:
            pause_s = backoff.pause_s(failures, at_least_s=at_least_s(error))
        await asyncio.sleep(pause_s)
    return await work()
