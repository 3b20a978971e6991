"""What `Ledger` promises of runs and tasks. One suite for memory, Redis and a Redis Cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ledger_samples import LIMITS, at, task, tasks

from penstock.transfer_queue.ledger import (
    BadPayload,
    LedgerError,
    StepError,
)
from penstock.transfer_queue.trajectory import DataCursor


async def test_a_run_is_created_once_and_keeps_its_limits(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.create_run(LIMITS, "config: 2")
    assert await ledger.config() == "config: 2"
    with pytest.raises(LedgerError, match="max_staleness"):
        await ledger.create_run(replace(LIMITS, max_staleness=5), "config: 2")


async def test_nothing_works_without_a_run(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.drop_run()
    with pytest.raises(LedgerError):
        await ledger.config()
    with pytest.raises(LedgerError):
        await ledger.submit(tasks(1))


async def test_submit_with_a_cursor_happens_once(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    assert await ledger.cursor() == DataCursor()
    assert await ledger.submit(tasks(3), cursor=at(3)) == 3
    assert await ledger.submit(tasks(3), cursor=at(3)) == 0
    assert await ledger.submit(tasks(2, start=3), cursor=at(5)) == 2
    assert await ledger.cursor() == at(5)
    assert (await ledger.status()).groups["queued"] == 5


async def test_a_submission_that_would_leave_a_gap_is_refused(make_ledger) -> None:
    """A ledger that lost its newest tasks is not told of later ones before it has them again."""
    ledger = await make_ledger(LIMITS)
    assert await ledger.submit(tasks(3), cursor=at(3), after=at(0)) == 3
    with pytest.raises(StepError, match="submit after 0:5: the tasks after 0:3 are not here"):
        await ledger.submit(tasks(1, start=5), cursor=at(6), after=at(5))
    assert await ledger.submit(tasks(3), cursor=at(3), after=at(5)) == 0  # a repeat stays a no-op
    assert await ledger.submit(tasks(2, start=3), cursor=at(0, epoch=1), after=at(3)) == 2
    assert (await ledger.status()).groups["submitted"] == 5


async def test_submit_without_a_cursor_skips_known_tasks(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    assert await ledger.submit([task(0, "eval/1"), task(1, "eval/1")]) == 2
    assert await ledger.submit([task(1, "eval/1"), task(2, "eval/1")]) == 1
    assert await ledger.cursor() == DataCursor()


async def test_tasks_arrive_as_they_were_sent(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    sent = replace(task(1), extra_info={"x": [1, 2.5, None, "ä"], "n": np.int64(3)}, sampling={"temperature": 0.0})
    await ledger.submit([sent])
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    assert lease.task == replace(sent, extra_info={"x": [1, 2.5, None, "ä"], "n": 3})


@pytest.mark.parametrize("bad", ["", "two words", "new\nline", "x" * 300])
async def test_task_names_that_the_ledger_cannot_keep_are_refused(make_ledger, bad: str) -> None:
    ledger = await make_ledger(LIMITS)
    with pytest.raises(LedgerError, match="task_id"):
        await ledger.submit([replace(task(1), task_id=bad)])


async def test_a_field_that_is_not_plain_data_is_named(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    with pytest.raises(BadPayload, match=r"train/0001: ground_truth.*object"):
        await ledger.submit([replace(task(1), ground_truth=object())])
