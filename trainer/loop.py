"""The training loop. One process per rank, started by torchrun or alone; the same steps in the same order on each.

    event loop            queue calls, deadlines, files; tasks: the next batch, the last version, spill and checkpoint
    torch thread          every forward, backward, update, copy of weights and collective, one after the other

Step s is trained at version s and publishes version s + 1. After a crash the loop starts at the newest checkpoint and
trains the recorded batches again, publishing nothing until it is past the newest version. Where that checkpoint is
behind the commit, because a newer one is damaged, the first of these come from the archive.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.trainer.checks import check_job
from penstock.trainer.job import TrainJob
from penstock.trainer.ranks.preemption import StepAbandoned
from penstock.trainer.state.checkpoint import CheckpointFailed, NotSaved
from penstock.trainer.stopping import TrainingDiverged
from penstock.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


async def train(job: TrainJob) -> None:
    """Train to `job.config.steps`, or until `trainer.stop` says that it is enough, resuming where an earlier call
    stopped; then write ``final_model/``.

    Cancelled, it abandons the current step if that has changed no weight yet, else finishes it; then it saves,
    commits and raises `CancelledError`, all within `job.stop_timeout_s`. Raises `BadJob`, `DataError`, `BatchTimeout`,
    `BatchesDiffer`, `TrainingDiverged`, `QueueError`; of the queue's, `TrainerFenced` and `TooManyFiltered`
    are permanent. Where devices are shared also `TurnTimeout`, `TurnLost` and, permanent, `OverBudget`.
    """
    check_job(job)
    stop = asyncio.Event()
    running = asyncio.create_task(_train(job, stop), name="train")
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await _stopped(running, job.stop_timeout_s)
        raise


async def _stopped(running: asyncio.Task[None], timeout_s: float) -> None:
    """Let the loop end by itself; cancel it if that takes too long, or if this is cancelled too.

    Raises `NotSaved` where its last checkpoint failed.
    """
    try:
        _, late = await asyncio.wait({running}, timeout=timeout_s)
        if late:
            logger.error("not stopped within %.0f s; what was not committed will be trained again", timeout_s)
    finally:
        running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
        logger.error("while stopping: %s", result, exc_info=result)
    if isinstance(result, CheckpointFailed):
        raise NotSaved(str(result)) from result


async def _train(job: TrainJob, stop: asyncio.Event) -> None:
    async with Trainer.started(job) as p:
        p.preemption.listen(stop.is_set)
        for step in range(p.step, job.config.steps):
            batch = None if await p.is_over() else await p.take(step, stop)
            if batch is None:
                break
            p.source.prefetch(step + 1)
            async with p.turn():
                p.preemption.begin_step()
                try:
                    scored = await p.work("score", p.learner.score, batch)
                    advantages = await p.work("advantages", p.learner.advantages, batch, scored)
                    again = step < p.publisher.published
                    metrics = await p.work("update", p.learner.update, batch, scored, advantages, again=again)
                except StepAbandoned:
                    await p.give_up(step)
                    break
                except TrainingDiverged:
                    await p.keep(batch)
                    raise
                await p.announce(step + 1)
                await p.record(batch, metrics, advantages.tokens)
                is_due = (step + 1) % job.config.checkpoint_every == 0
                if step not in p.saver.replays:  # those are archived, and the queue has freed them
                    await p.spiller.begin(batch, frees=not is_due and step + 1 < job.config.steps)
                if is_due:
                    await p.save()
            if job.config.eval_every and (step + 1) % job.config.eval_every == 0:
                p.evaluate()
        await p.finish()
