"""Trying again: a limit, a cause, and waits that spread out the workers that were refused at the same moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.tools.base import ToolUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Before attempt n+1: [half, whole] of ``first_wait_s * 2 ** (n - 1)``, drawn at random, at most `max_wait_s`."""

    retries: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0

    def wait_s(self, attempt: int, asked_s: float | None = None) -> float:
        """Seconds before the attempt after `attempt` (from 1); never less than the service asked for."""
        whole = min(self.max_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))
        return max(random.uniform(whole / 2, whole), min(asked_s or 0.0, self.max_wait_s))


async def retry(work: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """`work()`, again after `ToolUnavailable`, which promises that nothing was done; any other error travels at once.

    Raises the last `ToolUnavailable`, with the number of attempts, where the policy's limit is reached.
    """
    for attempt in range(1, policy.retries + 1):
        try:
            return await work()
        except ToolUnavailable as error:
            await asyncio.sleep(policy.wait_s(attempt, error.after_s))
    try:
        return await work()
    except ToolUnavailable as error:
        raise ToolUnavailable(error.component, f"{error.reason} ({policy.retries + 1} attempts)") from error
