"""Batches of a step whose episodes cannot be trained, on a rank that was told to stop meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from trainer_support import ProducingQueue, make_job

from penstock.trainer import ModelLimits
from penstock.trainer.source import BatchSource
from penstock.transfer_queue import Limits

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
