"""Waiting for what another task or process brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], deadline_s: float = 200.0) -> None:
    """Returns once `condition` is true. Raises `TimeoutError` after `deadline_s`."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


def until_in_threads(condition: Callable[[], bool], deadline_s: float = 200.0) -> None:
    """The same where threads bring it about. Blocks."""
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {deadline_s:.0f} s")
        time.sleep(0.01)
