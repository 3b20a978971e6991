"""The parts of one trainer process, built in the order in which a restart needs them, closed in the opposite one.

Rank 0 alone has the data's feeder, the recorder with its sinks, and the evaluator.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from penstock.common import pattern_of
from penstock.trainer.batch import GREEDY_MEMBER, StepBatch, UntrainableEpisodes
from penstock.trainer.data.order import CurriculumTasks, StreamedTasks
from penstock.trainer.data.rows import DatasetRow, DataStream, Feeder, TaskOrder, load_rows
from penstock.trainer.engine import Engine, update_speed
from penstock.trainer.engines import ENGINES
from penstock.trainer.evaluate import Evaluator
from penstock.trainer.export import save_final_adapter, save_final_model
from penstock.trainer.job import BadJob, TrainJob, needs_of_advantage, threads_here
from penstock.trainer.learner import Learner
from penstock.trainer.metrics import MAX_FAULTS, means_by_episode
from penstock.trainer.publish import Publisher
from penstock.trainer.ranks.agreement import check_same_batch
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.ranks.heartbeat import Heartbeat
from penstock.trainer.ranks.preemption import Preemption
from penstock.trainer.sinks import SinkJob
from penstock.trainer.sinks.async_sink import open_sinks
from penstock.trainer.source import BatchSource
from penstock.trainer.state.recorder import Recorder
from penstock.trainer.state.saver import Saver, Spiller
from penstock.trainer.stopping import Stopping
from penstock.trainer.timeline import Timeline, Track
from penstock.trainer.trainer_devices import TrainerDevices
from penstock.trainer.usage import RankUsage
from penstock.transfer_queue import IDLE, SETUP, STEP, DataCursor, QueueError, check_quotas

CLOSE_TIMEOUT_S = 10.0
P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The parts that the loop works with. `recorder`, `evaluator` and `feeder` are there on rank 0 only."""

    job: TrainJob
    in_torch: TorchThread
    ranks: Ranks
    devices: TrainerDevices
    engine: Engine
    learner: Learner
    publisher: Publisher
    saver: Saver
    spiller: Spiller
    source: BatchSource
    recorder: Recorder | None
    evaluator: Evaluator | None
    feeder: Feeder | None
    timeline: Timeline
    usage: RankUsage
    step: int
    """The step to be trained next; also the version of the weights."""
    step_began: float
    over: str = ""
    """Why the run ends before its last step."""
    failures: Counter[str] = field(default_factory=Counter)
    """`Status.failures` at the last step."""

    @classmethod
    @asynccontextmanager
    async def started(cls, job: TrainJob) -> AsyncIterator[Trainer]:
        """Bad data and a bad model are found before anything is changed in the queue."""
        async with AsyncExitStack() as stack:
            in_torch = TorchThread(threads_here(job.config))
            stack.callback(in_torch.close)
            ranks = await in_torch(_open_ranks, job)
            stack.push_async_callback(_close_ranks, in_torch, ranks)
            usage = RankUsage(ranks.rank, job.run.queue, shares_devices=job.turn is not None)
            await stack.enter_async_context(usage.reported())
            limits = job.config.rank_timeout_s, job.config.collective_timeout_s
            heartbeat = await in_torch(Heartbeat.start, ranks, *limits)
            if heartbeat is not None:
                stack.push_async_callback(asyncio.to_thread, heartbeat.close)
                stack.push(heartbeat.leave)
            timeline = Timeline(job.run_dir if ranks.is_rank0 else None)
            stack.callback(timeline.write)
            feeder, recorder, evaluator = (
                await asyncio.to_thread(first_rank_parts, job, timeline) if ranks.is_rank0 else [None] * 3
            )
            devices = TrainerDevices(job, ranks, in_torch, timeline)
            await stack.enter_async_context(devices.renewal())
            async with devices.loading():
                engine = await in_torch(ENGINES.get(job.config.engine), job, ranks)
            await devices.started(engine)
            publisher = Publisher(job, engine, ranks, in_torch, timeline)
            saver = Saver(job, engine, ranks, in_torch, timeline)
            spiller = Spiller(job, publisher, ranks.is_rank0, is_replica_leader=ranks.is_replica_leader)
            source = BatchSource(
                job,
                feeder,
                engine.limits,
                ranks.data.rank,
                ranks.data.world,
                remind=publisher.remind if ranks.is_rank0 else None,
            )
            for part in (saver, publisher, spiller, evaluator, source):
                if part is not None:
                    stack.push_async_callback(part.close)
            if recorder is not None:
                stack.push_async_callback(asyncio.to_thread, recorder.close)
            learner = Learner(job.config, engine, ranks.data)
            leaving = (publisher, saver, spiller)
            places = (job, in_torch, ranks, devices)
            parts = cls(
                *places, engine, learner, *leaving, source, recorder, evaluator, feeder, timeline, usage, 0, 0.0
            )
            await parts._resume()
            await devices.leave(publisher)
            if heartbeat is not None:
                stack.push(heartbeat.leave)  # once more: the first of all to hear of an error
            yield parts

    async def take(self, step: int, stop: asyncio.Event) -> StepBatch | None:
        """The step's batch, one and the same on all ranks; None on all if any received a stop.

        Episodes that a rank cannot train leave the step on all ranks. Raises `BatchesDiffer` on all ranks.
        """
        self.usage.begin(IDLE)
        while True:
            batch: StepBatch | None = None
            problems: Mapping[str, str] = {}
            with self.timeline.during(Track.STEPS, "wait", step):
                try:
                    batch = await self.source.take(step, stop)
                except UntrainableEpisodes as error:
                    problems = error.problems
            # One rank may hold its batch while another still waits for it.
            await self.in_torch(self.ranks.meet)
            everywhere = await self.in_torch(self.ranks.gather, problems)
            problems = {episode: problem for of_rank in everywhere for episode, problem in of_rank.items()}
            if not problems:
                break
            await self.source.leave_out(step, problems)
        self.usage.begin(f"{STEP}{step}")
        if await self.in_torch(self.ranks.any, batch is None):
            return None
        assert batch is not None
        await self.in_torch(check_same_batch, self.ranks, batch)
        return batch

    @property
    def preemption(self) -> Preemption:
        return self.ranks.own(Preemption)

    async def work(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the torch thread as a phase of the running step. Raises `StepAbandoned` on all ranks."""
        self.devices.check()
        with self.timeline.during(Track.STEPS, name, self.step):
            await self.in_torch(self.preemption.check)
            return await self.in_torch(function, *args, **kwargs)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """The devices are the trainer's in the block; where no engine shares them, they always are."""
        return self.devices.held(self.publisher, self.step)

    async def announce(self, version: int) -> None:
        """The weights are copied, and go out in the background; the version before is waited for."""
        with self.timeline.during(Track.STEPS, "announce", self.step):
            await self.publisher.announce(version)

    async def record(self, batch: StepBatch, metrics: Mapping[str, Any], advantages: Tensor) -> None:
        """Writes numbers and times of a trained step, and begins the next one. advantages [N]"""
        of_order: dict[str, float] = {}
        if self.job.data.curriculum is not None:
            parts = await self.in_torch(self.ranks.data.gather, batch.rewards_by_task)
            if self.feeder is not None:
                rewards = {task: rewards for part in parts for task, rewards in part.items()}
                of_order = self.feeder.observe(batch.step, rewards)
        now = time.monotonic()
        wall_s, self.step_began, self.step = now - self.step_began, now, batch.step + 1
        if self.recorder is None:
            return
        self.saver.remember(batch.step, batch.groups)
        wait_s = self.source.last_wait_s + self.devices.last_wait_s
        busy_s = max(wall_s - wait_s, 1e-9)
        times = {
            "wall_s": wall_s,
            "wait_s": wait_s,
            "train_s": busy_s,
            "publish_s": self.publisher.last_s,
            "checkpoints_damaged": self.saver.damaged,
            "tokens_per_s": metrics["tokens"] / busy_s,
        }
        computed = metrics["tokens"] - metrics["prefix_tokens_saved"]
        trained = computed, metrics["tokens_sampled"], metrics["tokens_squared"]
        times |= update_speed(self.engine.flops, self.job.config, self.ranks, trained, busy_s)
        by_episode = means_by_episode(advantages, batch)
        status = await self.job.run.queue.status()
        failures = Counter(status.failures)
        faults = Counter(metrics["faults"]) + (new := failures - self.failures)
        times |= {"faults": dict(faults.most_common(MAX_FAULTS)), "attempts_failed": new.total()}
        self.failures = failures
        for number, decile in enumerate(status.over_age, start=1):
            times[f"length_decile/{number}"] = decile.tokens_up_to
            times[f"over_age_share/{number}"] = decile.over_age / max(1, decile.episodes)
        with self.timeline.during(Track.STEPS, "record", batch.step):
            await asyncio.to_thread(self.recorder.step, batch, {**metrics, **of_order, **times}, by_episode)
        await asyncio.to_thread(self.timeline.write)

    async def save(self) -> None:
        with self.timeline.during(Track.STEPS, "save", max(self.step - 1, 0)):
            await self.spiller.settle()
            await self.saver.save(self.step, self.feeder.cursor if self.feeder else DataCursor(), self.publisher)

    async def keep(self, batch: StepBatch) -> None:
        """All ranks diverged at `batch`: it is archived, and as no checkpoint has it, the index says: not learned."""
        await self.spiller.keep(batch)
        await self.in_torch(self.ranks.meet)  # the first rank that ends takes the others along

    async def give_up(self, step: int) -> None:
        """The trainer received a stop, and `step` has changed nothing: save what was trained before."""
        logger.info("stop requested: step %d is given up before it changed a weight, its batch stays the queue's", step)
        await self.save()

    async def is_over(self) -> bool:
        """Return True if trainer.stop ends the run before its last step. A collective if it could."""
        if not self.job.config.stop.enabled:
            return False
        verdict = self.recorder.why_over() if self.recorder is not None else None
        self.over = str(await self.in_torch(self.ranks.from_rank0, verdict or ""))
        return bool(self.over)

    def evaluate(self) -> None:
        if self.evaluator is not None:
            self.evaluator.start(self.step)

    async def finish(self) -> None:
        """Publish, save and commit what is trained; where the run is over also the final model and evaluation."""
        self.usage.begin(SETUP)
        is_over = self.step >= self.job.config.steps or bool(self.over)
        await self.publisher.settle()
        if is_over or not self.saver.has(self.step):
            async with self.turn():
                await self.save()
                await self.saver.settle()
                if is_over:
                    # Rank 0 alone waited for the last version and the commit.
                    await self.in_torch(self.ranks.meet)
                    folder, model = self.job.run_dir / "final_model", self.job.run.model
                    await self.in_torch(save_final_model, self.engine, self.ranks, model, folder)
                    adapter = self.job.run_dir / "final_adapter"
                    await self.in_torch(save_final_adapter, self.engine, self.ranks, adapter)
        await self.saver.settle()
        if not is_over:
            return
        if self.evaluator is not None:
            await self.evaluator.finish(self.step, 600.0)
        if self.recorder is not None:
            self.recorder.ended(self.step, self.over or f"all {self.step} steps are trained")

    async def _resume(self) -> None:
        # Fence off every earlier trainer of the run, also one that is alive because its lock lapsed.
        queue = self.job.run.queue
        holder = f"the trainer on {socket.gethostname()}, process {os.getpid()}"
        claimed = await queue.claim_training(holder) if self.ranks.is_rank0 else None
        epoch = int(await self.in_torch(self.ranks.from_rank0, claimed))
        queue.join_training(epoch)
        self.step = await self.saver.restore()
        if self.ranks.is_rank0:
            committed = max(self.saver.replays, default=self.step - 1) + 1
            again = len(self.saver.replays) + await queue.rewind(committed)
            logger.info("step %d of %d, %d recorded batches to replay", self.step, self.job.config.steps, again)
        # No rank leases before the queue is rewound.
        await self.in_torch(self.ranks.meet)
        self.source.replays |= self.saver.replays
        await self.publisher.start(self.step, epoch)
        if self.feeder is not None and self.recorder is not None:
            await queue.commit(self.step)
            self.failures = Counter((await queue.status()).failures)
            await asyncio.to_thread(self.recorder.rewind, self.step, self.saver.updates_lost)
            await self.feeder.start(self.step)
        self.step_began = time.monotonic()


def _open_ranks(job: TrainJob) -> Ranks:
    """One rank may hold its batch while another still waits for it: as long as a batch may take, and longer. Rank 0
    alone waits for a version to be written, and for the devices in a run with turns."""
    config, turn = job.config, job.turn
    waits_s = (config.batch_timeout_s, config.publish_timeout_s, turn.hand_over_s if turn else 0.0)
    patience_s = max(waits_s) + 120
    return Ranks.open(config.collective_timeout_s, config.parallel.layout, patience_s=patience_s)


async def _close_ranks(in_torch: TorchThread, ranks: Ranks) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await in_torch(ranks.close)
    except TimeoutError:
        logger.error(
            "torch work did not end within %.0f s; the process group is left to the operating system", CLOSE_TIMEOUT_S
        )


def first_rank_parts(job: TrainJob, timeline: Timeline) -> tuple[Feeder, Recorder, Evaluator]:
    """Raises `BadJob`, `DataError`: bad data is found before anything is changed in the queue."""
    rows = load_rows(job.data.train)
    try:
        check_quotas(job.limits, {row.data_source for row in rows})
    except QueueError as error:
        raise BadJob(f"{error} (dataset {job.data.train})") from error
    sources = job.config.sources
    for number, row in enumerate(rows):
        if (pattern := pattern_of(row.data_source, sources)) is not None:
            rows[number] = replace(row, group_size=sources[pattern].group_size)
    eval_rows = load_rows(job.data.eval, job.data.eval_limit) if job.data.eval else []
    feeder = Feeder(job.run.queue, job.limits, _order_of(job, rows), job.config.steps)
    stopping = Stopping(job.config.stop)
    sinks = [*job.watchers, *open_sinks(job.config.sinks, SinkJob(job.run_dir, job.settings))]
    recorder = Recorder(job.run_dir, job.run.model, job.config.save_trajectories, stopping, sinks)
    return feeder, recorder, Evaluator(job.run.queue, eval_rows, recorder, timeline)


def _order_of(job: TrainJob, rows: Sequence[DatasetRow]) -> TaskOrder:
    """Raises `BadJob`."""
    sampling = {"greedy_member": GREEDY_MEMBER} if "greedy" in needs_of_advantage(job.config) else None
    data, seed = job.data, job.run.seed
    if data.curriculum is None:
        return StreamedTasks(rows, DataStream(len(rows), seed, data.shuffle), sampling)
    try:
        return CurriculumTasks(rows, data.curriculum, job.run_dir, seed, shuffle=data.shuffle, sampling=sampling)
    except ValueError as error:
        raise BadJob(f"data.curriculum: {error}") from error
