"""The right to head a run: one `penstock run` at a time, kept in the run's queue.

claim ─► renew every RENEW_S ─► release      a second head waits for the first one's lease, or is refused
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from penstock.common import process_has_ended, process_identity
from penstock.transfer_queue import Head, QueueError, QueueUnavailable, TransferQueue

logger = logging.getLogger("penstock.run")

HEAD_TTL_S = 30.0
"""A head that has not renewed its lease for this long has lost the run."""
RENEW_S = 5.0
POLL_S = 1.0


class HeadTaken(QueueError):
    """Another `penstock run` owns the run; the message names it."""


class HeadLease:
    """The right to head a run, kept in its queue. Every call is one script there."""

    def __init__(
        self, queue: TransferQueue, *, ttl_s: float = HEAD_TTL_S, renew_s: float = RENEW_S, poll_s: float = POLL_S
    ) -> None:
        self._queue = queue
        self._ttl_s, self._renew_s, self._poll_s = ttl_s, renew_s, poll_s
        self.holder = f"{socket.gethostname()}, process {os.getpid()} ({process_identity()})"
        """This process, for people and as `process_identity`."""

    async def claim(self) -> None:
        """Waits for the lease of a head that has died. Raises `HeadTaken` as soon as the other one renews its lease."""
        head = await self._claim()
        if head is not None and process_has_ended(head.holder.rpartition("(")[2].rstrip(")")):
            head = await self._claim(dead=head.holder)
        if head is not None:
            logger.warning("the run's head was %s; its lease ends in %.0f s, unless it lives", head.holder, head.left_s)
        while head is not None:
            await asyncio.sleep(self._poll_s)
            before, head = head, await self._claim()
            if head is not None and (head.holder != before.holder or head.left_s > before.left_s):
                raise HeadTaken(
                    f"{head.holder} heads this run and is alive: a run has one `penstock run`. "
                    "Stop that one, or choose another name=…"
                )

    async def keep(self) -> None:
        """Renews until cancelled. Raises `HeadTaken` where another head has taken the run over."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                head = await self._claim()
            except QueueUnavailable as error:
                # No other head can take the lease over meanwhile; whether the run can wait, its roles decide.
                logger.warning("the head's lease is not renewed: %s", error)
                continue
            if head is not None:
                raise HeadTaken(
                    f"{head.holder} has taken this run over: this head was silent for more than {self._ttl_s:.0f} s"
                )

    async def release(self) -> None:
        await self._queue.release_head(self.holder)

    async def _claim(self, dead: str = "") -> Head | None:
        return await self._queue.claim_head(self.holder, self._ttl_s, dead)


@contextlib.asynccontextmanager
async def run_headed(queue: TransferQueue) -> AsyncIterator[asyncio.Task[None]]:
    """Entered when this process owns the run; the task keeps the lease, and ends by raising `HeadTaken`."""
    lease = HeadLease(queue)
    await lease.claim()
    keeping = asyncio.create_task(lease.keep(), name="head lease")
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with contextlib.suppress(QueueError):  # it ends by itself
            await lease.release()
