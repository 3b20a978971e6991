"""Trained trajectories leave the store's memory: they wait for their commit in the batch log on the trainer's disk.

    begin(s) ──► the spill before is done? ──► task: version s + 1 is out? ─► queue.spill(s, this rank's share)

So the store holds the payloads of a step or two, however far apart the checkpoints are.
"""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.trainer.batch import StepBatch
from penstock.trainer.job import TrainJob
from penstock.trainer.publish import Publisher

SPILL_TIMEOUT_S = 600.0
"""A share that is not in the log by then, its version's publication included, stops the run."""

logger = logging.getLogger(__name__)


class Spiller:
    """Every rank has one and spills its own share. Without `TrainJob.spill` every method is a no-op."""

    def __init__(self, job: TrainJob, publisher: Publisher, first: bool, *, leads: bool = True) -> None:
        """`leads`: of the ranks that hold the same rows, one spills them."""
        self._queue = job.queue
        self._enabled = job.spill and leads
        self._publisher = publisher
        self._first = first
        self._task: asyncio.Task[None] | None = None

    async def begin(self, batch: StepBatch) -> None:
        """Spill a trained step in the background; none whose checkpoint, and with it the commit, follows at once.

        Raises what went wrong with the step before.
        """
        if not self._enabled:
            return
        await self.settle()
        episodes = [trajectory.episode_id for trajectory in batch.trajectories]
        self._task = asyncio.create_task(self._spill(batch.step, episodes), name=f"spill step {batch.step}")

    async def settle(self) -> None:
        """Wait for the spill under way; raises what went wrong (disk full, queue away).

        Comes before every checkpoint on every rank. A checkpoint is whole only when all ranks wrote their shards, so
        no share can reach the log after the commit that drops the log's files.
        """
        if self._task is None:
            return
        began = time.monotonic()
        try:
            await self._task
        finally:
            self._task = None
        if self._first:
            await self._queue.add_wait("trainer", "spill", time.monotonic() - began)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _spill(self, step: int, episodes: list[str]) -> None:
        async with asyncio.timeout(SPILL_TIMEOUT_S):
            await self._publisher.until_published(step + 1)
            moved = await self._queue.spill(step, episodes)
        logger.debug("step %d: %d of %d trajectories moved to the batch log", step, moved, len(episodes))
