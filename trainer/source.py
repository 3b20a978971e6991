"""Batches for the loop: step s + 1 is leased and read while step s trains.

    prefetch(s) ──► task: feed ─► lease_batch(s) ⟲ until there ─► read this rank's share ─► check ──► take(s)

The task waits for the queue, polling with a growing pause. Its deadline counts only while the loop itself waits in
`take`: a batch that cannot be there before the step under way is published is not late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from penstock.common import Backoff, cancel_and_wait
from penstock.trainer.batch import ModelLimits, StepBatch, make_step_batch, row_cost, share_of, without_greedy
from penstock.trainer.data.rows import Feeder
from penstock.trainer.job import TrainJob, needs_of_advantage
from penstock.trainer.state.checkpoint import Groups
from penstock.transfer_queue import BadPayload, Batch, FieldValues, Trajectory, fields_of

POLL = Backoff(0.02, 0.25)
REMIND_S = 5.0
READS, READ_AGAIN = 3, Backoff(0.5, 2.0)
"""A payload that cannot be read so often is gone; a slot of a cluster that moves comes back."""
logger = logging.getLogger(__name__)


class BatchTimeout(RuntimeError):
    """No batch within trainer.batch_timeout_s; the message has the queue's cause and state."""


class PayloadsLost(RuntimeError):
    """Payloads of a fixed step are gone or cannot be trained, and transfer_queue.lost_payloads is ``strict``.

    The message has the command.
    """


class BatchSource:
    """Owns the prefetching task; `close` ends it. `feeder` is None on all ranks but the first."""

    def __init__(
        self,
        job: TrainJob,
        feeder: Feeder | None,
        model: ModelLimits,
        rank: int,
        world: int,
        *,
        remind: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`remind` is awaited now and then while a batch is waited for: the queue may have forgotten the weights."""
        self._job, self._queue = job, job.run.queue
        self._feeder = feeder
        self._model = model
        self._rank = rank
        self._remind = remind
        self._world = world
        self._task: asyncio.Task[StepBatch] | None = None
        self._step = -1
        self._waiting_since: float | None = None
        self.replays: dict[int, Groups] = {}
        """Committed steps that are trained again: they come from the archive. Those that it lacks have no groups."""
        self.last_wait_s = 0.0
        """Seconds that the loop waited in the last `take`."""

    def prefetch(self, step: int) -> None:
        if self._step != step and step < self._job.config.steps:
            self._step = step
            self._task = asyncio.create_task(self._fetch(step), name=f"batch of step {step}")

    async def take(self, step: int, stop: asyncio.Event) -> StepBatch | None:
        """The batch of `step`; None where `stop` was set first. Raises `BatchTimeout`, `UntrainableEpisodes`,
        `PayloadsLost`, `QueueError`."""
        self.prefetch(step)
        assert self._task is not None
        self._waiting_since = time.monotonic()
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({self._task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            self.last_wait_s, self._waiting_since = time.monotonic() - self._waiting_since, None
        if stop.is_set():
            return None
        if self._feeder is not None:
            await self._queue.add_wait("trainer", "batch", self.last_wait_s)
        return self._task.result()

    async def leave_out(self, step: int, problems: Mapping[str, str]) -> None:
        """Take episodes that cannot be trained out of the step; `take` then has the others. `problems`: by episode id,
        the same on all ranks. Raises `PayloadsLost`, `TrainerFenced`."""
        await self.close()  # where this rank was told to stop it still waits for the batch
        first = next(iter(problems.values()))
        await self._drop(step, list(problems), f"{len(problems)} episodes cannot be trained: {first}")
        self._step = -1

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait([self._task])

    async def _fetch(self, step: int) -> StepBatch:
        if step in self.replays:
            return await self._read(Batch(step, self.replays[step]))
        batch = await self._lease(step)
        for _ in range(READS):
            try:
                return await self._read(batch)
            except BadPayload as error:
                batch = await self._without_lost(batch, error)
        return await self._read(batch)

    async def _read(self, batch: Batch) -> StepBatch:
        costs = None
        if self._world > 1:
            # Every rank asks the queue for the same, and decides alike. Response lengths only: those of prompts differ
            # little, and to know them their ids would have to be moved.
            ids = [episode for group in batch.groups for episode in group]
            of_episode = {
                one.episode_id: sum(
                    row_cost(int(segment["version_spans"][:, 2].max(initial=0)), self._model.width)
                    for segment in one.segments
                )
                for one in await self._get(batch.step, ids, ["version_spans"])
            }
            costs = [sum(of_episode[episode] for episode in group) for group in batch.groups]
        share = share_of(batch, self._rank, self._world, self._job.config.minibatches, costs)
        ids = [episode for group in share for episode in batch.groups[group]]
        is_replay = batch.step in self.replays
        trajectories = await (self._archived(batch.step, ids) if is_replay else self._queue.read(ids))
        bound = self._job.limits.max_staleness
        needs = needs_of_advantage(self._job.config)
        make = partial(make_step_batch, has_labels="implicit" in needs)
        step_batch = await asyncio.to_thread(make, batch, share, trajectories, bound, self._model)
        return without_greedy(step_batch) if "greedy" in needs else step_batch

    async def _get(self, step: int, episodes: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        if step not in self.replays:
            return await self._queue.get(episodes, fields)
        return [fields_of(one, fields) for one in await self._archived(step, episodes)]

    async def _archived(self, step: int, episodes: Sequence[str]) -> list[Trajectory]:
        assert self._job.archive is not None
        return list((await asyncio.to_thread(self._job.archive.read, step, episodes)).values())

    async def _without_lost(self, batch: Batch, error: BadPayload) -> Batch:
        """The batch again, without the episodes whose payload is gone for good; every rank finds the same ones.

        A node of a cluster that lost its disk, or a replica that took over too early, loses payloads of episodes that
        the index still has. Their step is fixed: trained with them or not at all.
        """
        lost, pauses = [episode for group in batch.groups for episode in group], READ_AGAIN.pauses()
        for attempt in range(READS):
            if attempt:
                await pauses.sleep()
            lost = [episode for episode in lost if not await self._is_readable(episode)]
        if not lost:
            return batch
        named = ", ".join(lost[:5])
        await self._drop(batch.step, lost, f"the payloads of {len(lost)} episodes are gone ({named}): {error}")
        return await self._lease(batch.step)

    async def _drop(self, step: int, episodes: Sequence[str], problem: str) -> None:
        if self._job.lost_payloads == "strict":
            await self._queue.check_training()  # a later trainer has committed and freed what this one misses
            raise PayloadsLost(
                f"step {step}: {problem}. transfer_queue.lost_payloads is strict; to drop and count them and continue: "
                "penstock run RECIPE --resume transfer_queue.lost_payloads=drop"
            )
        if step in self.replays:
            self.replays[step] = [[one for one in group if one not in episodes] for group in self.replays[step]]
            dropped = len(episodes)
        else:
            dropped = await self._queue.drop_lost(step, episodes)
        logger.error("step %d: %s; %d episodes are dropped from the step", step, problem, dropped)

    async def _is_readable(self, episode_id: str) -> bool:
        try:
            await self._queue.read([episode_id])
        except BadPayload:
            return False
        return True

    async def _lease(self, step: int) -> Batch:
        pauses, reminded_at = POLL.pauses(), time.monotonic()
        while True:
            if self._feeder is not None:
                await self._feeder.fill()
            answer = await self._queue.lease_batch(step)
            if isinstance(answer, Batch):
                return answer
            waited_s = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
            if waited_s > self._job.config.batch_timeout_s:
                status = await self._queue.status()
                raise BatchTimeout(
                    f"no batch for step {step} within {waited_s:.0f} s (trainer.batch_timeout_s): {answer.cause}. "
                    f"TransferQueue: version {status.version}, groups {dict(status.groups)}, episodes "
                    f"{dict(status.episodes)}, workers {dict(status.workers)}"
                )
            if self._remind is not None and time.monotonic() - reminded_at > REMIND_S:
                await self._remind()
                reminded_at = time.monotonic()
            await pauses.sleep()
