"""Chunks, pauses and errors in a fixed order, in place of an engine's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from penstock.rollout_server import Chunk


class Script:
    """Yields chunks, sleeps for numbers (seconds), raises errors; knows whether it was closed."""

    def __init__(self, *items: Chunk | Exception | float) -> None:
        self.items, self.closed = items, False

    async def play(self) -> AsyncGenerator[Chunk]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Chunk):
                    yield item
                else:
                    await asyncio.sleep(item)
        finally:
            self.closed = True
