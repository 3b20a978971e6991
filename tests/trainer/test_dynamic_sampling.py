"""DAPO's dynamic sampling, from the data stream to the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import ProducingQueue, lines, make_job, make_trajectory, task_name

from penstock.trainer import TrainJob, train
from penstock.transfer_queue import Limits, QueueError, Trajectory

pytestmark = pytest.mark.torch
STEPS = 5


def is_silent(number: int) -> bool:
    """All members of the n-th task get the same reward: two thirds of the stream."""
    return number % 3 != 1


def produce(task_id: str, member: int, version: int, *, silent: Callable[[int], bool] = is_silent) -> Trajectory:
    _, epoch, index = task_id.split("/")
    reward = 1.0 if silent(10 * int(epoch) + int(index)) else float(member % 2)
    return replace(make_trajectory(task_id, member, version), reward=reward)


def job_of(folder: Path, model: str, max_staleness: int, most: int = 8, **how: Callable[[int], bool]) -> TrainJob:
    filters = {"filter_groups": "zero_variance", "max_filtered_steps": most}
    limits = Limits(group_size=4, groups_per_step=2, max_staleness=max_staleness, **filters)
    queue = ProducingQueue(limits, partial(produce, **how))
    return make_job(folder, model, {"steps": STEPS}, queue=queue, limits=limits)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_every_step_is_full_of_groups_with_a_signal(tmp_path: Path, tiny_model: str, max_staleness: int) -> None:
    job = job_of(tmp_path, tiny_model, max_staleness)
    await train(job)
    metrics = lines(job, "metrics.jsonl")
    assert [(line["groups"], line["zero_variance_groups"]) for line in metrics] == [(2, 0)] * STEPS
    assert all(line["advantage_abs"] > 0.5 and line["updates"] == 1 for line in metrics)
    speaking = [number for number in range(100) if not is_silent(number)][: 2 * STEPS]
    trained = [episode for line in lines(job, "steps.jsonl") for episode in line["episodes"]]
    assert trained == [f"{task_name(number)}#{member}" for number in speaking for member in range(4)]
    status = await job.run.queue.status()
    assert status.groups["committed"] == 2 * STEPS
    assert status.groups["filtered"] >= speaking[-1] + 1 - 2 * STEPS


async def test_tasks_that_are_all_too_easy_end_the_run_with_its_cause(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(QueueError, match=r"step 0: \d+ groups had equal rewards .* more than 4 steps of 2"):
        await train(job_of(tmp_path, tiny_model, 0, 4, silent=lambda number: True))
