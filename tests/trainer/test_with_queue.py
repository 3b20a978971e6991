"""The loop against the in-memory queue with a worker beside it: admission, crashes, and accounts that balance."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.faulty_queue import Crash, FaultyQueue
from trainer_support import assert_books_balance, make_job, make_trajectory, write_rows

from penstock.trainer import PayloadsLost, TrainJob, train
from penstock.trainer.state.checkpoint import RecentBatches
from penstock.transfer_queue import BatchLog, TrainerFenced
from penstock.weight_sync import Manifest, read_verified

pytestmark = pytest.mark.torch
STEPS = 6


async def work(queue: Any) -> None:
    """A worker whose server always has the newest version."""
    while True:
        version = (await queue.status()).version
        for lease in await queue.lease_episodes("w", 3, version):
            await asyncio.sleep(0)
            await queue.complete(lease, make_trajectory(lease.task.task_id, lease.member, version))
        await asyncio.sleep(0.002)


async def run(job: TrainJob, lives: int) -> None:
    job.run.queue.clock.now += 3600.0  # what an earlier worker held is free
    worker = asyncio.create_task(work(job.run.queue))
    try:
        for _ in range(lives - 1):
            with pytest.raises(Crash):
                await train(job)
        await train(job)
    finally:
        await stop(worker)


async def run_until_crash(job: TrainJob) -> None:
    worker = asyncio.create_task(work(job.run.queue))
    with pytest.raises(Crash):
        await train(job)
    await stop(worker)


async def stop(worker: asyncio.Task[None]) -> None:
    worker.cancel()
    (ended,) = await asyncio.gather(worker, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended


async def make(
    folder: Path, model: str, max_staleness: int, config: dict[str, Any] | None = None, spill: bool = True
) -> TrainJob:
    settings = {"steps": STEPS, **(config or {})}
    queue = FaultyQueue(batch_log=BatchLog(folder / "batches"))
    job = make_job(folder, model, settings, queue=queue, max_staleness=max_staleness, spill=spill)
    await job.run.queue.create_run(job.limits, "")
    return job


async def check(job: TrainJob) -> None:
    metrics = assert_books_balance(await job.run.queue.status(), job.run_dir, STEPS)
    assert all(line["staleness_max"] <= job.limits.max_staleness for line in metrics)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_whole_run(tmp_path: Path, tiny_model: str, max_staleness: int) -> None:
    job = await make(tmp_path, tiny_model, max_staleness)
    await run(job, lives=1)
    await check(job)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("call", "number"), [("lease_batch", 3), ("publish_version", 4), ("commit", 4)])
async def test_a_crash_in_a_gap(tmp_path: Path, tiny_model: str, moment: str, call: str, number: int) -> None:
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.crash_at = (moment, call, number)
    await run(job, lives=2)
    await check(job)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_crash_while_a_step_is_spilled(tmp_path: Path, tiny_model: str, moment: str) -> None:
    """Steps 0 to 2 are trained again: from the log, or from the store where the log came too late."""
    job = await make(tmp_path, tiny_model, 1, {"checkpoint_every": 100})
    job.run.queue.crash_at = (moment, "spill", 2)
    await run(job, lives=2)
    await check(job)
    assert (await job.run.queue.status()).episodes["spilled"] == (STEPS - 1) * 8
    assert BatchLog(tmp_path / "batches").steps() == []


@pytest.mark.parametrize(("call", "number"), [("lease_batch", 3), ("publish_version", 3), ("commit", 4)])
async def test_a_trainer_that_was_replaced_ends(tmp_path: Path, tiny_model: str, call: str, number: int) -> None:
    """Another one claims the run while this one is alive: this one ends, the next one trains every step once."""
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.replace_at = (call, number)
    worker = asyncio.create_task(work(job.run.queue))
    with pytest.raises(TrainerFenced, match="the one in its place"):
        await train(job)
    await stop(worker)
    await run(job, lives=1)
    await check(job)


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_step_goes_on_without_lost_payloads(tmp_path: Path, tiny_model: str, lost: int) -> None:
    """One of a group of four, or three: then the fourth leaves with them."""
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.lose_at = (2, lost)
    await run(job, lives=1)
    lines = (job.run_dir / "steps.jsonl").read_text().splitlines()
    trained = {episode for line in lines for episode in json.loads(line)["episodes"]}
    status = await job.run.queue.status()
    left = 1 if lost == 1 else 4
    assert (status.version, status.episodes["payload_lost"], status.groups["payload_lost"]) == (STEPS, left, lost // 3)
    assert len(trained) == STEPS * 8 - left
    assert not trained & set(job.run.queue.lost)
    assert status.episodes["completed"] == status.episodes["committed"] + len(await job.run.queue.held()) + left


async def test_under_strict_a_lost_payload_ends_the_run(tmp_path: Path, tiny_model: str) -> None:
    made = await make(tmp_path, tiny_model, 1)
    strict = replace(made, lost_payloads="strict")
    made.run.queue.lose_at = (2, 1)
    worker = asyncio.create_task(work(made.run.queue))
    with pytest.raises(PayloadsLost, match=r"step 2.*--resume transfer_queue\.lost_payloads=drop"):
        await train(strict)
    await stop(worker)
    await run(made, lives=1)
    assert (await made.run.queue.status()).episodes["payload_lost"] == 1


async def test_a_step_of_which_nothing_is_left_ends_the_run(tmp_path: Path, tiny_model: str) -> None:
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.lose_at = (2, 8)
    worker = asyncio.create_task(work(job.run.queue))
    with pytest.raises(PayloadsLost, match=r"step 2.*penstock train export"):
        await train(job)
    await stop(worker)


async def test_a_step_whose_checkpoint_is_due_is_not_spilled(tmp_path: Path, tiny_model: str) -> None:
    job = await make(tmp_path, tiny_model, 1, {"checkpoint_every": 3})
    await run(job, lives=1)
    await check(job)
    assert (await job.run.queue.status()).episodes["spilled"] == 4 * 8
    (tmp_path / "every").mkdir()
    job = await make(tmp_path / "every", tiny_model, 1, {"checkpoint_every": 1})
    await run(job, lives=1)
    assert (await job.run.queue.status()).episodes["spilled"] == 0


LOST = [
    *(("lease_batch", n) for n in range(4)),
    *(("publish_version", n) for n in range(1, 4)),
    ("commit", 2),
]


@pytest.mark.parametrize(("call", "number"), LOST)
async def test_a_queue_that_lost_its_last_second_trains_nothing_twice(
    tmp_path: Path, tiny_model: str, call: str, number: int
) -> None:
    """Its machine is lost after the commit of step 4, and with it everything after the call."""
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.durable_until = (call, number)
    job.run.queue.crash_at = ("after", "commit", 4)
    await run_until_crash(job)
    job.run.queue.lose_the_last_second()
    assert (await job.run.queue.status()).committed_step < 4
    await run(job, lives=1)
    await check(job)
    assert (await job.run.queue.latest_version()).version == STEPS


async def test_after_catching_up_the_weights_are_announced_anew(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.durable_until = ("publish_version", 2)
    job.run.queue.crash_at = ("after", "commit", 4)
    await run_until_crash(job)
    job.run.queue.lose_the_last_second()
    job.run.queue.crash_at = ("before", "lease_batch", 4)
    await run_until_crash(job)
    assert "behind the checkpoint: it lost its latest entries and is brought forward to version 4" in caplog.text
    assert "the weights of version 4 were gone; written again" in caplog.text
    found = await job.run.queue.latest_version()
    assert (found.version, (await job.run.queue.status()).committed_step) == (4, 4)
    read_verified(Manifest.parse(found.manifest))


async def test_a_queue_further_behind_than_the_checkpoint_remembers_is_refused(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.trainer.state.saver.RecentBatches", partial(RecentBatches, keep_s=0.0))
    job = await make(tmp_path, tiny_model, 1)
    job.run.queue.durable_until = ("lease_batch", 0)
    job.run.queue.crash_at = ("after", "commit", 4)
    await run_until_crash(job)
    job.run.queue.lose_the_last_second()
    with pytest.raises(RuntimeError, match=r"of version 4, the queue is at 0 and lacks step 1, .* not of one run"):
        await train(job)


async def test_evaluation_splits_are_run_and_removed(tmp_path: Path, tiny_model: str) -> None:
    made = await make(tmp_path, tiny_model, 1)
    evals = write_rows(tmp_path / "eval.jsonl", 4)
    job = make_job(tmp_path, tiny_model, {"steps": STEPS, "eval_every": 2}, queue=made.run.queue, data={"eval": evals})
    await run(job, lives=1)
    lines = [json.loads(line) for line in (job.run_dir / "eval.jsonl").read_text().splitlines()]
    assert lines[-1]["version"] == STEPS
    assert all(line["episodes"] == 4 and line["failed"] == 0 for line in lines)
    assert (await job.run.queue.status()).other_splits == {}
