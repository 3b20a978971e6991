"""Batches of a step whose episodes cannot be trained, on a rank that was told to stop meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from trainer_support import VOCAB, ProducingQueue, make_job

from penstock.trainer import ModelLimits
from penstock.trainer.source import BatchSource
from penstock.transfer_queue import BadPayload, Limits, TrainerFenced, Trajectory

pytestmark = pytest.mark.torch


class FarQueue(ProducingQueue):
    """The step is fixed for other ranks already; this one's answer is under way."""

    async def drop_lost(self, step: int, episode_ids: Sequence[str]) -> int:
        return len(episode_ids)


async def test_one_task_waits_for_a_step_after_episodes_left_it(tmp_path: Path) -> None:
    queue = FarQueue(Limits(group_size=4, groups_per_step=2, max_staleness=1))
    queue.starved = True
    job, stop = make_job(tmp_path, "model", queue=queue, lost_payloads="drop"), asyncio.Event()
    source = BatchSource(job, None, ModelLimits(64, 64, 16, None, None), 1, 2)
    stop.set()
    assert await source.take(0, stop) is None
    await source.leave_out(0, {"train/0#0": "it cannot be trained"})
    assert await source.take(0, stop) is None
    assert sum(task.get_name() == "batch of step 0" for task in asyncio.all_tasks()) == 1
    await source.close()


class OvertakenQueue(ProducingQueue):
    """Another trainer claims the run when the first payload is read, and frees it."""

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        if not self._state.trainer:
            await self.beside().claim_training("another trainer")
        raise BadPayload(f"{episode_ids[0]}: no payload; its step is committed")


async def test_an_overtaken_trainer_is_told_so_and_not_that_payloads_are_lost(tmp_path: Path) -> None:
    queue = OvertakenQueue(Limits(group_size=4, groups_per_step=2, max_staleness=0))
    queue.twin = True
    job = make_job(tmp_path, "model", queue=queue, lost_payloads="strict")
    source = BatchSource(job, None, ModelLimits(64, VOCAB, 16, None, None), 0, 1)
    with pytest.raises(TrainerFenced, match="another trainer"):
        await source.take(0, asyncio.Event())


async def test_ranks_share_a_step_of_the_archive_as_they_shared_it_from_the_queue(tmp_path: Path) -> None:
    """Sums over other rows differ in their last bits."""
    queue = ProducingQueue(Limits(group_size=4, groups_per_step=8, max_staleness=0))
    queue.twin = True
    job, stop = make_job(tmp_path, "model", queue=queue, archives=True), asyncio.Event()
    assert job.archive is not None
    limits = ModelLimits(64, VOCAB, 16, None, None)
    first = await BatchSource(job, None, limits, 1, 2).take(0, stop)
    job.archive.append(0, await queue.read([name for group in queue.steps[0] for name in group]))
    source = BatchSource(job, None, limits, 1, 2)
    source.replays = {0: queue.steps[0]}
    again = await source.take(0, stop)
    assert first is not None
    assert again is not None
    assert [one.episode_id for one in again.trajectories] == [one.episode_id for one in first.trajectories]
