"""Keeps the queue filled a little beyond what admission can take, so that rollout never waits for data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.trainer.data import Row, Stream
from penstock.transfer_queue import DataCursor, Limits, Status, StepError, Task, TransferQueue


class Feeder:
    """Submits training tasks in stream order. Only rank 0 feeds.

    The cursor is the queue's own: tasks that were submitted once stay there over a restart of the trainer, and
    `submit(tasks, cursor)` is a no-op for a place that the queue has passed.
    """

    def __init__(
        self,
        queue: TransferQueue,
        limits: Limits,
        rows: Sequence[Row],
        stream: Stream,
        steps: int,
        *,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """`sampling` is that of every training task."""
        self._queue = queue
        self._limits = limits
        self._rows = rows
        self._stream = stream
        self._steps = steps
        self._sampling = sampling
        self.cursor = DataCursor()
        """Place in the data stream after the last submitted task."""

    async def start(self) -> None:
        self.cursor = await self._queue.cursor()
        await self.fill()

    async def fill(self) -> int:
        """Submit what is missing; returns how many groups. Groups that were dropped or died are replaced here."""
        count = missing_groups(await self._queue.status(), self._limits, self._steps)
        if count > 0:
            places = self._stream.places(self.cursor, count)
            end = self._stream.after(places[-1])
            await self._submit([self._task(place) for place in places], end)
        return max(count, 0)

    async def _submit(self, tasks: Sequence[Task], end: DataCursor) -> None:
        try:
            await self._queue.submit(tasks, cursor=end, after=self.cursor)
        except StepError:
            # It has lost its newest tasks with its machine: they come first.
            self.cursor = await self._queue.cursor()
        else:
            self.cursor = end

    def _task(self, place: DataCursor) -> Task:
        row = self._rows[self._stream.row_index(place)]
        return row.task(task_id=f"train/{place.epoch:04d}/{place.index:08d}", split="train", sampling=self._sampling)


def missing_groups(status: Status, limits: Limits, steps: int) -> int:
    """Groups to submit: (max_staleness + 2) steps ahead of consumption, never more than the run can still train."""
    # Parked groups cannot be admitted before others ship: were they counted, a backlog of a source at its quota would
    # take all the room and a step could never be filled.
    waiting = sum(status.groups.get(state, 0) for state in ("queued", "admitted", "ready")) - status.parked
    ahead = (limits.max_staleness + 2) * limits.groups_per_step
    still_needed = (steps - status.version) * limits.groups_per_step - status.groups.get("shipped", 0)
    return min(ahead, still_needed) - waiting
