"""Groups of asyncio tasks that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(work: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all of `work` concurrently and returns the results in order.

    On the first failure, or when the caller is cancelled, the others are cancelled and awaited before the exception
    propagates: none keeps running in the background.
    """
    if len(work) == 1:  # the common case: no task, no future
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """Waits up to `timeout_s` seconds for `tasks` (None: not at all), cancels the rest and awaits their end.

    Failures of the tasks are not raised; read them from the tasks.
    """
    every = list(tasks)
    if timeout_s is not None and every:
        await asyncio.wait(every, timeout=timeout_s)
    for task in every:
        task.cancel()
    await asyncio.gather(*every, return_exceptions=True)
