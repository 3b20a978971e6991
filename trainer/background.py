"""Work of the trainer that runs while it trains: publishing, saving, spilling."""

from __future__ import annotations

import asyncio
import time

from penstock.common import cancel_and_wait
from penstock.transfer_queue import TransferQueue


class BackgroundWork:
    """One piece of work at a time, in `_task`. How long the trainer waits for it is counted in the queue as `cause`."""

    def __init__(self, queue: TransferQueue, cause: str, *, is_counted: bool = True) -> None:
        self._queue = queue
        self._cause, self._is_counted = cause, is_counted
        self._task: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Waits for the work under way. Raises its error."""
        if self._task is None:
            return
        began = time.monotonic()
        try:
            await self._task
        finally:
            self._task = None
        if self._is_counted:
            await self._queue.add_wait("trainer", self._cause, time.monotonic() - began)

    async def close(self) -> None:
        """Cancels the work under way. Its error is not raised."""
        if self._task is not None:
            await cancel_and_wait([self._task])
