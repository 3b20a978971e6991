"""Tasks for the miniature trainer, by the rule of trainer/feeder.py, without an end."""

from __future__ import annotations

from collections.abc import Sequence

from faults.episodes import cursor_at, position_of, task_at
from penstock.transfer_queue import DataCursor, Limits, Status, StepError, Task, TransferQueue


class Feeder:
    """Goes on at the queue's own cursor, which a queue that lost its tail turns back."""

    def __init__(self, queue: TransferQueue, limits: Limits) -> None:
        self._queue = queue
        self._limits = limits

    async def fill(self) -> None:
        start, status = await self._queue.cursor(), await self._queue.status()
        position = position_of(start)
        waiting = sum(status.groups.get(state, 0) for state in ("queued", "admitted", "ready")) - status.parked
        end = position + (self._limits.max_staleness + 2) * self._limits.groups_per_step - waiting
        if end > position:
            await self._submit([task_at(number) for number in range(position, end)], cursor_at(end), start)

    async def _submit(self, tasks: Sequence[Task], end: DataCursor, start: DataCursor) -> None:
        try:
            await self._queue.submit(tasks, cursor=end, after=start)
        except StepError:
            return  # the cursor was turned back meanwhile; the next call sees it


def drained(status: Status, limits: Limits) -> bool:
    """Nothing can become a step any more: groups that are left over are fewer than one needs."""
    groups = status.groups
    return groups["queued"] + groups["admitted"] == 0 and groups["ready"] < limits.groups_per_step
