"""Calls that one client makes at the same time share round trips, without a timer.

    lone call      ── fewer than AT_ONCE attempts under way ──► an attempt of its own, at once, in the caller's task
    other calls    ── wait ──► an attempt under way ends ──► all that wait, within the limits, go in one round trip

task             consumes          waits for             woken by
caller           its own job       its turn              the end of the shared attempt that took its job
shared attempt   jobs that wait    one round trip        created by the end of another attempt

Only the first attempt at a job is shared: what it leaves unfinished its caller repeats alone, by its own deadline. So
an error of one job, a broken connection or a silent Redis delays the other callers by one attempt at most. After an
attempt that left something unfinished every caller that waits goes alone too. A caller that is cancelled leaves the
queue; where its job is under way already, that attempt ends without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.common import cancel_and_wait
from penstock.transfer_queue.redis.client import Connection, WriteAndRun

AT_ONCE = 2
"""Attempts under way: one is packed and sent while Redis works on the other."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    job: WriteAndRun
    size: int
    turn: asyncio.Future[None]
    """Done once the job was attempted, its caller shall go alone, or its caller was cancelled."""


class Coalescing:
    """First attempts at jobs of one `Connection`. Safe for concurrent tasks of one event loop."""

    def __init__(self, connection: Connection, most_jobs: int, most_bytes: int) -> None:
        self._connection = connection
        self._most_jobs = most_jobs
        self._most_bytes = most_bytes
        self._under_way = 0
        self._queue: deque[_Waiting] = deque()
        """Empty where fewer than `AT_ONCE` attempts are under way."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def attempt(self, job: WriteAndRun, size: int) -> None:
        """Returns when the job has `ended`, or is its caller's to repeat. `size`: bytes that it sends; one that fills a
        round trip gains nothing by company and is left to its caller."""
        if size >= self._most_bytes:
            return
        if self._under_way < AT_ONCE:
            self._under_way += 1
            try:
                await self._connection.try_jobs([job])
            finally:
                self._end_attempt([job])
            return
        one = _Waiting(job, size, asyncio.get_running_loop().create_future())
        self._queue.append(one)
        await one.turn

    async def close(self) -> None:
        """Ends the shared attempts; their callers go alone."""
        await cancel_and_wait(list(self._tasks))

    def _end_attempt(self, jobs: Sequence[WriteAndRun]) -> None:
        self._under_way -= 1
        if not all(job.ended for job in jobs):
            _release(self._queue)  # who goes alone is passed over below
        while self._under_way < AT_ONCE and (share := self._next_share()):
            self._start_shared(share)

    def _next_share(self) -> list[_Waiting]:
        share: list[_Waiting] = []
        size = 0
        while self._queue:
            one = self._queue[0]
            if not one.turn.done():
                if share and (len(share) == self._most_jobs or size + one.size > self._most_bytes):
                    break
                share.append(one)
                size += one.size
            self._queue.popleft()
        return share

    def _start_shared(self, share: Sequence[_Waiting]) -> None:
        """What follows its end is a callback: a task that is cancelled before it begins runs no line of its own."""
        self._under_way += 1
        task = asyncio.create_task(self._connection.try_jobs([one.job for one in share]))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_shared, share))

    def _end_shared(self, share: Sequence[_Waiting], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%d calls that were sent together are repeated, each alone: %r", len(share), error)
        _release(share)
        self._end_attempt([one.job for one in share])


def _release(waiting: Iterable[_Waiting]) -> None:
    for one in waiting:
        if not one.turn.done():
            one.turn.set_result(None)
