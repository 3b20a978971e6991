"""What `TransferQueue` promises of runs and tasks. One suite for memory, Redis and a Redis Cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from queue_samples import LIMITS, at, task, tasks

from penstock.transfer_queue import BadPayload, DataCursor, QueueError, StepError


async def test_a_run_is_created_once_and_keeps_its_limits(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.create_run(LIMITS, "config: 2")
    assert await queue.config() == "config: 2"
    with pytest.raises(QueueError, match="max_staleness"):
        await queue.create_run(replace(LIMITS, max_staleness=5), "config: 2")


async def test_nothing_works_without_a_run(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.drop_run()
    with pytest.raises(QueueError):
        await queue.config()
    with pytest.raises(QueueError):
        await queue.submit(tasks(1))


async def test_submit_with_a_cursor_happens_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.cursor() == DataCursor()
    assert await queue.submit(tasks(3), cursor=at(3)) == 3
    assert await queue.submit(tasks(3), cursor=at(3)) == 0
    assert await queue.submit(tasks(2, start=3), cursor=at(5)) == 2
    assert await queue.cursor() == at(5)
    assert (await queue.status()).groups["queued"] == 5


async def test_a_submission_that_would_leave_a_gap_is_refused(make_queue) -> None:
    """A queue that lost its newest tasks is not told of later ones before it has them again."""
    queue = await make_queue(LIMITS)
    assert await queue.submit(tasks(3), cursor=at(3), after=at(0)) == 3
    with pytest.raises(StepError, match="submit after 0:5: the tasks after 0:3 are not here"):
        await queue.submit(tasks(1, start=5), cursor=at(6), after=at(5))
    assert await queue.submit(tasks(3), cursor=at(3), after=at(5)) == 0  # a repeat stays a no-op
    assert await queue.submit(tasks(2, start=3), cursor=at(0, epoch=1), after=at(3)) == 2
    assert (await queue.status()).groups["submitted"] == 5


async def test_submit_without_a_cursor_skips_known_tasks(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.submit([task(0, "eval/1"), task(1, "eval/1")]) == 2
    assert await queue.submit([task(1, "eval/1"), task(2, "eval/1")]) == 1
    assert await queue.cursor() == DataCursor()


async def test_tasks_arrive_as_they_were_sent(make_queue) -> None:
    queue = await make_queue(LIMITS)
    sent = replace(task(1), extra_info={"x": [1, 2.5, None, "ä"], "n": np.int64(3)}, sampling={"temperature": 0.0})
    await queue.submit([sent])
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    assert lease.task == replace(sent, extra_info={"x": [1, 2.5, None, "ä"], "n": 3})


@pytest.mark.parametrize("bad", ["", "two words", "new\nline", "x" * 300])
async def test_task_names_that_the_queue_cannot_keep_are_refused(make_queue, bad: str) -> None:
    queue = await make_queue(LIMITS)
    with pytest.raises(QueueError, match="task_id"):
        await queue.submit([replace(task(1), task_id=bad)])


async def test_a_field_that_is_not_plain_data_is_named(make_queue) -> None:
    queue = await make_queue(LIMITS)
    with pytest.raises(BadPayload, match=r"train/0001: ground_truth.*object"):
        await queue.submit([replace(task(1), ground_truth=object())])
