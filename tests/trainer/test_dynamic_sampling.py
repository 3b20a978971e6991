"""DAPO's dynamic sampling, from the data stream to the weights, on a real Redis."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import make_job, make_trajectory, task_name

from penstock.trainer import BadJob, TrainJob, train
from penstock.transfer_queue import QueueError, RedisServer, RedisTransferQueue, Trajectory, TransferQueueConfig

pytestmark = [pytest.mark.torch, pytest.mark.redis]
PASSWORD = "a-test-password"
STEPS = 5


def says_nothing(number: int) -> bool:
    """Of the n-th task: all its members get the same reward. Two thirds of the stream."""
    return number % 3 != 1


def number_of(task_id: str) -> int:
    _, epoch, index = task_id.split("/")
    return 10 * int(epoch) + int(index)


def made(task_id: str, member: int, version: int, *, easy: bool) -> Trajectory:
    reward = 1.0 if easy or says_nothing(number_of(task_id)) else float(member % 2)
    return replace(make_trajectory(task_id, member, version), reward=reward)


@asynccontextmanager
async def working(queue: RedisTransferQueue, *, easy: bool = False) -> AsyncIterator[None]:
    async def work() -> None:
        while True:
            version = (await queue.status()).version
            leases = await queue.lease_episodes("w", 3, version)
            for lease in leases:
                await queue.complete(lease, made(lease.task.task_id, lease.member, version, easy=easy))
            await asyncio.sleep(0 if leases else 0.005)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended


@asynccontextmanager
async def job_on_redis(folder: Path, model: str, max_staleness: int) -> AsyncIterator[TrainJob]:
    async with RedisServer(folder / "redis", PASSWORD) as server:
        run = f"refill-{secrets.token_hex(4)}"
        queue = await RedisTransferQueue.connect(server.url, run, TransferQueueConfig(), PASSWORD)
        made = make_job(folder, model, {"steps": STEPS}, queue=queue, max_staleness=max_staleness)
        limits = replace(made.limits, filter_groups="zero_variance", max_filtered_steps=4)
        await queue.create_run(limits, "refill: 1")
        try:
            yield replace(made, limits=limits)
        finally:
            await queue.close()


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_every_step_is_full_of_groups_that_say_something(
    tmp_path: Path, tiny_model: str, max_staleness: int
) -> None:
    async with job_on_redis(tmp_path, tiny_model, max_staleness) as job, working(job.run.queue):
        await train(job)
        status = await job.run.queue.status()
    lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["groups"], line["zero_variance_groups"]) for line in lines] == [(2, 0)] * STEPS
    assert all(line["advantage_abs"] > 0.5 and line["updates"] == 1 for line in lines)
    steps = [json.loads(line) for line in (job.run_dir / "steps.jsonl").read_text().splitlines()]
    trained = [episode for line in steps for episode in line["episodes"]]
    speaking = [number for number in range(100) if not says_nothing(number)][: 2 * STEPS]
    assert trained == [f"{task_name(number)}#{member}" for number in speaking for member in range(4)]
    groups, episodes = status.groups, status.episodes
    assert groups["committed"] == 2 * STEPS
    # All before the last that was trained; beyond it the workers may have gone on.
    assert groups["filtered"] >= speaking[-1] + 1 - 2 * STEPS
    assert episodes["filtered"] == 4 * groups["filtered"]
    assert groups["submitted"] == sum(groups[state] for state in groups if state != "submitted")


async def test_tasks_that_are_all_too_easy_end_the_run_with_its_cause(tmp_path: Path, tiny_model: str) -> None:
    async with job_on_redis(tmp_path, tiny_model, 0) as job, working(job.run.queue, easy=True):
        with pytest.raises(QueueError, match=r"step 0: \d+ groups had equal rewards .* more than 4 steps of 2"):
            await train(job)


async def test_turn_rewards_that_the_filter_would_not_see_are_refused(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"turn_reward_weight": 0.5, "advantage": "gigpo"})
    with pytest.raises(BadJob, match=r"filter_groups is zero_variance and trainer\.turn_reward_weight 0\.5"):
        await train(replace(job, limits=replace(job.limits, filter_groups="zero_variance")))
