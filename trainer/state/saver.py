"""Checkpoint, then commit: the queue forgets a step's trajectories only when a durable checkpoint holds the step.

save(step) ──► the save before is done? ──► copy (torch thread) ──► task: shards ─► seal ─► version is out? ─► commit

Trained trajectories wait for their commit in the archive on the trainer's disk, not in the store's memory:

    begin(s) ──► the spill before is done? ──► task: archive.append(s, this rank's share) ─► version s + 1 is out? ─►
                 queue.spill(s, its episodes)

So the store holds the payloads of a step or two, however far apart the checkpoints are. Before the commit the archive's
index says which batches the weights of the checkpoint saw: if it is found damaged, the steps that the one before lacks
are trained again from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import CheckpointException

from penstock.trainer.background import BackgroundWork
from penstock.trainer.batch import StepBatch
from penstock.trainer.engine import Engine
from penstock.trainer.job import TrainJob
from penstock.trainer.publish import Publisher
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.state.checkpoint import (
    CheckpointInfo,
    CheckpointStore,
    Groups,
    NotResumable,
    RecentBatches,
    failed_save,
    save_timeout_s,
)
from penstock.trainer.state.restore import newest_whole
from penstock.trainer.timeline import Timeline, Track
from penstock.transfer_queue import BadPayload, DataCursor, Status, Trajectory

if TYPE_CHECKING:
    from penstock.transfer_queue import Archive

logger = logging.getLogger(__name__)


class Saver(BackgroundWork):
    """Every rank has one; rank 0's seals and commits."""

    def __init__(
        self, job: TrainJob, engine: Engine, ranks: Ranks, in_torch: TorchThread, timeline: Timeline | None = None
    ) -> None:
        super().__init__(job.run.queue, "checkpoint")
        self._timeline = timeline or Timeline()
        self._engine = engine
        self._ranks = ranks
        self._in_torch = in_torch
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.keep_checkpoints)
        self._archive = job.archive
        self._recent = RecentBatches()
        self._publish_timeout_s = job.config.publish_timeout_s
        self._timeout_s = save_timeout_s(self._publish_timeout_s, engine.state_bytes)
        self._nbytes = 0
        """Bytes of all ranks' parts of a checkpoint."""
        self._saved = -1
        self.updates_lost: Collection[int] = ()
        """Committed steps of which no checkpoint has the update, nor the archive the batch, as `restore` finds out.
        Rank 0's."""
        self.replays: Mapping[int, Groups] = {}
        """Committed steps that the restored checkpoint lacks: they are trained again from the archive. Those that it
        lacks too have no groups and change no weight."""

    @property
    def damaged(self) -> int:
        """Checkpoints of this run that were found damaged and set aside, in all its lives."""
        return self._store.damaged

    def has(self, step: int) -> bool:
        """Return True if the state after `step` steps is saved, or is being saved."""
        return step == self._saved

    async def restore(self) -> int:
        """Load the newest whole checkpoint; returns the step to continue with, 0 for a fresh run.

        Where the queue has committed later steps, because a newer checkpoint is damaged, it continues with the first
        of these if the archive has any of them, see `replays`, else after them. See also `updates_lost`.
        A queue that is behind the checkpoint is brought forward to it. Raises `NotResumable` where the queue has
        committed steps and no checkpoint is left at all, or is further behind than the checkpoint remembers.
        """
        await self._in_torch(self._begin)
        if self._ranks.is_rank0:
            await asyncio.to_thread(self._store.open)
        checkpoint = await self._in_torch(newest_whole, self._store, self._ranks)
        # No rank loads before rank 0 has found the checkpoint to be of this run.
        committed = 0
        if self._ranks.is_rank0:
            status = await self._queue.status()
            committed = status.committed_step
            if committed > (checkpoint.step if checkpoint else 0):
                await self._behind(checkpoint, committed)
            if checkpoint is not None:
                await self._catch_up(checkpoint, status)
                self._recent.update(checkpoint.batches)
                self._recent.update(self.replays)
        report = committed, list(self.replays.items())  # JSON would make text of a dictionary's keys
        committed, replays = await self._in_torch(self._ranks.from_rank0, report)
        self.replays = dict(replays)
        step = max(checkpoint.step, committed) if checkpoint else 0
        if self._ranks.is_rank0 and self._archive is not None:
            await self._rewind(self._archive, step, checkpoint)
        if checkpoint is None:
            return 0
        await self._in_torch(self._engine.load, checkpoint.path, checkpoint.ranks)
        self._saved = checkpoint.step
        logger.info("restored %s: step %d", checkpoint.path, checkpoint.step)
        return min(self.replays, default=step)

    def remember(self, step: int, groups: Groups) -> None:
        """`step` is trained on these groups: the next checkpoints say so."""
        self._recent.add(step, groups)

    async def save(self, step: int, data_cursor: DataCursor, publisher: Publisher) -> None:
        """Begin to save the state after `step` steps; a no-op if that is saved already."""
        if step == self._saved:
            return
        await self.settle()
        self._saved = step
        # Rank 0 alone waited for the version, and the commit, of the checkpoint before.
        await self._in_torch(self._ranks.meet)
        async with self._failure_named(step):
            future = await self._in_torch(self._engine.begin_save, self._store.unfinished(step))
        checkpoint = CheckpointInfo(
            self._store.unfinished(step), step, data_cursor, self._ranks.world, self._recent.below(step)
        )
        self._task = asyncio.create_task(self._finish(checkpoint, future, publisher), name=f"save {step}")

    def _begin(self) -> None:
        """A collective. One rank may have more to write than another: all wait as long as the largest part takes."""
        largest = int(self._ranks.max(self._engine.state_bytes))
        self._nbytes = int(self._ranks.sum(self._engine.state_bytes))
        self._timeout_s = save_timeout_s(self._publish_timeout_s, largest)
        self._ranks.await_saves(self._timeout_s)

    async def _catch_up(self, checkpoint: CheckpointInfo, status: Status) -> None:
        """Redis may lose its last second with its machine; the checkpoint gives it the steps trained meanwhile."""
        if status.step >= checkpoint.step and status.version + 1 >= checkpoint.step:
            return
        unknown = [step for step in range(status.step, checkpoint.step) if step not in checkpoint.batches]
        if unknown:
            raise NotResumable(
                f"the checkpoint is of version {checkpoint.step}, the queue is at {status.version} and lacks step "
                f"{unknown[0]}, which the checkpoint does not remember: they are not of one run. Start a run with a "
                "new name, or bring back the queue's data"
            )
        logger.warning(
            "the queue is at version %d and next step %d, behind the checkpoint: it lost its latest entries and is "
            "brought forward to version %d",
            status.version,
            status.step,
            checkpoint.step,
        )
        await self._queue.commit(checkpoint.step, checkpoint.batches)

    async def _rewind(self, archive: Archive, step: int, checkpoint: CheckpointInfo | None) -> None:
        """The archive's index ends where training continues. Raises `NotResumable`."""
        try:
            if not step and len(await asyncio.to_thread(archive.index)):
                raise NotResumable(
                    f"{archive.folder} is the archive of another run: set another transfer_queue.archive"
                )
            await asyncio.to_thread(archive.rewind, step, self.updates_lost)
        except BadPayload as error:
            raise NotResumable(f"{archive.folder}: {error}. Move the archive away to go on without it") from error
        if checkpoint is not None:  # an earlier life may have been killed between its commit and the archive's
            await self._index(checkpoint)

    async def _index(self, checkpoint: CheckpointInfo) -> None:
        """The archive has the steps of the checkpoint from now on. A disk that refuses ends no run."""
        if self._archive is None:
            return
        try:
            oldest = self._store.oldest_step
            await asyncio.to_thread(self._archive.commit, checkpoint.step, checkpoint.batches, oldest)
        except (OSError, BadPayload) as error:
            logger.error("%s: steps below %d are not in the archive: %s", self._archive.folder, checkpoint.step, error)

    async def _behind(self, checkpoint: CheckpointInfo | None, committed: int) -> None:
        """The checkpoint lacks updates of committed steps: see `replays` and `updates_lost`. Raises `NotResumable`."""
        if checkpoint is None:
            raise NotResumable(
                f"the queue has committed {committed} steps, and {self._store.folder} holds no whole checkpoint: what "
                "they learned is gone. Bring the checkpoints back, or start a run with a new name"
            )
        steps, whole, reason = range(checkpoint.step, committed), dict[int, list[list[str]]](), "there is no archive"
        try:
            if self._archive is not None:
                reason = "the archive has none of them"
                whole = await asyncio.to_thread(self._archive.committed, checkpoint.step, committed)
        except (BadPayload, OSError) as error:
            reason = str(error)
        # The queue has deleted their trajectories, and stopping would gain nothing.
        self.updates_lost = set(steps) - whole.keys()
        if not whole:
            logger.error(
                "steps %d to %d of the damaged checkpoint cannot be trained again (%s); continuing at step %d with the "
                "weights after step %d",
                *(steps[0], steps[-1], reason, committed, steps[0] - 1),
            )
            return
        self.replays = {step: whole.get(step, []) for step in steps}
        logger.warning(
            "steps %d to %d of the damaged checkpoint are trained again from the archive%s",
            *(steps[0], steps[-1]),
            f"; steps that it lacks are passed: {sorted(self.updates_lost)}" if self.updates_lost else "",
        )

    async def _finish(self, checkpoint: CheckpointInfo, future: Future[Any], publisher: Publisher) -> None:
        with self._timeline.during(Track.CHECKPOINT, "checkpoint", checkpoint.step):
            async with asyncio.timeout(self._timeout_s):
                async with self._failure_named(checkpoint.step):
                    await asyncio.wrap_future(future)
                if not self._ranks.is_rank0:
                    return
                # A checkpoint of a trainer that was replaced would stand for the steps of the one in its place.
                await self._queue.check_training()
                async with self._failure_named(checkpoint.step):
                    await asyncio.to_thread(
                        self._store.seal, checkpoint.step, checkpoint.data_cursor, checkpoint.ranks, checkpoint.batches
                    )
                # A step counts as trained when its version is out; the queue commits trained steps only.
                await publisher.until_published(checkpoint.step)
                # First the index: a committed step is in no other place if this checkpoint is found damaged.
                await self._queue.check_training()
                await self._index(checkpoint)
                await self._queue.commit(checkpoint.step, checkpoint.batches)
                self._recent.committed(checkpoint.step)

    @asynccontextmanager
    async def _failure_named(self, step: int) -> AsyncIterator[None]:
        """Raises `CheckpointFailed` for what fails in the block; half a checkpoint does not stay to fill the disk."""
        folder = self._store.unfinished(step)
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            # On a slow disk it takes long, and leases are renewed meanwhile.
            named = partial(failed_save, folder, self._nbytes, error, removes=self._ranks.is_rank0)
            raise await asyncio.to_thread(named) from error


SPILL_TIMEOUT_S = 600.0
"""A share that is not in the log by then, its version's publication included, stops the run."""


class Spiller(BackgroundWork):
    """Every rank has one and spills its own share. Without `TrainJob.archive` every method is a no-op.

    `settle` comes before every checkpoint on every rank. A checkpoint is whole only when all ranks wrote their shards,
    so the archive has every share of a step before the commit that indexes it.
    """

    def __init__(self, job: TrainJob, publisher: Publisher, first: bool, *, is_replica_leader: bool = True) -> None:
        """`is_replica_leader`: of the ranks that hold the same rows, one spills them."""
        super().__init__(job.run.queue, "spill", is_counted=first)
        self._archive = job.archive if is_replica_leader else None
        self._publisher = publisher

    async def begin(self, batch: StepBatch, *, frees: bool = True) -> None:
        """Archive a trained step in the background. `frees`: the queue frees it; not where a checkpoint, and with
        it the commit, follows at once. Raises what went wrong with the step before.
        """
        await self.settle()
        if self._archive is not None:
            work = self._spill(self._archive, batch.step, batch.trajectories, frees)
            self._task = asyncio.create_task(work, name=f"spill step {batch.step}")

    async def keep(self, batch: StepBatch) -> None:
        """Archive the batch that the run ends with, whatever is under way. The queue does not free it."""
        if self._archive is not None:
            await self._spill(self._archive, batch.step, batch.trajectories, frees=False)

    async def _spill(self, archive: Archive, step: int, trajectories: Sequence[Trajectory], frees: bool) -> None:
        async with asyncio.timeout(SPILL_TIMEOUT_S):
            await self._queue.check_training()  # the archive may be another trainer's by now
            try:
                await asyncio.to_thread(archive.append, step, trajectories)
            except OSError as error:
                self._archive = None
                logger.error(
                    "step %d is not archived, nor is any later step of this trainer's life: %s. The run continues; "
                    "trained trajectories wait for their commit in the queue",
                    step,
                    error,
                )
                return
            if frees:
                await self._publisher.until_published(step + 1)
                await self._queue.spill(step, [trajectory.episode_id for trajectory in trajectories])
