"""Parts of an episode that run at the same time and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; on the first failure the others are cancelled and awaited, so that none runs on."""
    if len(work) == 1:  # the usual turn has one call: no task, no future
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
