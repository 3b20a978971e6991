"""Usage of a trainer's rank by step: the time of its devices, for the queue's ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.common import DeviceClock, cancel_and_wait, life_of_process, visible_devices
from penstock.transfer_queue import IDLE, REPORT_EVERY_S, SETUP, QueueError, TransferQueue, UsageMeter

logger = logging.getLogger(__name__)


class RankUsage:
    """Counts for what `begin` has named last, and reports every `REPORT_EVERY_S`. It begins with `SETUP`."""

    def __init__(self, rank: int, queue: TransferQueue, *, shares_devices: bool) -> None:
        """`shares_devices`: while this trainer waits they are an engine's, which counts them."""
        self._meter = UsageMeter(f"trainer-{rank} {life_of_process()}")
        self._queue, self._shares_devices = queue, shares_devices
        self._clock = DeviceClock(min(1, len(visible_devices())))  # a rank sees the GPUs of all, and has one
        self._name = SETUP

    def begin(self, name: str) -> None:
        """The devices work for `name` from now on: a step, or `IDLE` or `SETUP`."""
        self._count()
        self._name = name

    @asynccontextmanager
    async def reported(self) -> AsyncIterator[None]:
        """Reports go out in the block, and a last one at its end."""
        keeper = asyncio.create_task(self._keep(), name="usage of devices")
        try:
            yield
        finally:
            await cancel_and_wait([keeper])
            await self._report()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self._report()

    async def _report(self) -> None:
        self._count()
        try:
            await self._meter.send(self._queue.report_usage)
        except QueueError as error:
            logger.warning("usage is not reported yet: %s", error)

    def _count(self) -> None:
        elapsed_s = self._clock.elapsed_s()
        if self._name != IDLE or not self._shares_devices:
            self._meter.add(self._name, "trainer_s", elapsed_s)
