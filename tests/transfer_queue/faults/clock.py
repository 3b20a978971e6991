"""A clock that jumps by an hour, as one that was set wrongly does when it is set right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

HOUR_S = 3600.0
REAL_TIME, REAL_MONOTONIC = time.time, time.monotonic


class JumpingClock:
    """Stands in for `time.time`, which jumps both ways, and `time.monotonic`, which only jumps ahead, for this process.

    The event loop's timers are made of the latter, so every timeout that is running ends at once.
    """

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.monotonic_s = 0.0

    def install(self) -> None:
        time.time = lambda: REAL_TIME() + self.wall_s
        time.monotonic = lambda: REAL_MONOTONIC() + self.monotonic_s

    @staticmethod
    def remove() -> None:
        time.time, time.monotonic = REAL_TIME, REAL_MONOTONIC


@asynccontextmanager
async def jump_now_and_then(chance: random.Random, enabled: bool) -> AsyncIterator[None]:
    """The clock of this process jumps every half second or so."""
    if not enabled:
        yield
        return
    clock = JumpingClock()
    clock.install()
    jumping = asyncio.create_task(_jump(clock, chance))
    try:
        yield
    finally:
        jumping.cancel()
        clock.remove()


async def _jump(clock: JumpingClock, chance: random.Random) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.2, 0.8))
        clock.wall_s = chance.choice([-HOUR_S, 0.0, HOUR_S])
        clock.monotonic_s += chance.choice([0.0, 0.0, HOUR_S])
