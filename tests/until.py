"""Waiting for what another task or process brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], deadline_s: float = 200.0) -> None:
    """Returns once `condition` is true. Raises `TimeoutError` after `deadline_s`."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)
