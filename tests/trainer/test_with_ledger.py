"""The loop against the in-memory ledger with a worker beside it: admission, crashes, and accounts that balance."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer_support import make_job, make_trajectory, write_rows

from penstock.trainer.job import TrainJob
from penstock.trainer.loop import train
from penstock.transfer_queue import memory

pytestmark = pytest.mark.torch
STEPS = 6


class Crash(Exception):
    """The trainer died here."""


class DyingLedger(memory.MemoryLedger):
    """Raises `Crash` once, before or after the call named in `crash_at`."""

    crash_at: tuple[str, str, int] | None = None

    async def _call(self, name: str, number: int, argument: Any) -> Any:
        if self.crash_at == ("before", name, number):
            self.crash_at = None
            raise Crash
        result = await getattr(super(), name)(argument)
        if self.crash_at == ("after", name, number):
            self.crash_at = None
            raise Crash
        return result

    async def lease_batch(self, step: int) -> Any:
        return await self._call("lease_batch", step, step)

    async def publish_version(self, announcement: Any) -> Any:
        return await self._call("publish_version", announcement.version, announcement)

    async def commit(self, step: int) -> Any:
        return await self._call("commit", step, step)


async def work(ledger: Any) -> None:
    """A worker whose server always has the newest version."""
    while True:
        version = (await ledger.status()).version
        for lease in await ledger.lease_episodes("w", 3, version):
            await asyncio.sleep(0)
            await ledger.complete(lease, make_trajectory(lease.task.task_id, lease.member, version))
        await asyncio.sleep(0.002)


async def run(job: TrainJob, lives: int) -> None:
    worker = asyncio.create_task(work(job.ledger))
    try:
        for _ in range(lives - 1):
            with pytest.raises(Crash):
                await train(job)
        await train(job)
    finally:
        worker.cancel()
        (ended,) = await asyncio.gather(worker, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended


async def make(folder: Path, model: str, max_staleness: int) -> TrainJob:
    job = make_job(folder, model, {"steps": STEPS}, ledger=DyingLedger(), max_staleness=max_staleness)
    await job.ledger.create_run(job.limits, "")
    return job


async def check(job: TrainJob) -> None:
    status = await job.ledger.status()
    assert (status.version, status.committed_step, status.bytes) == (STEPS, STEPS, 0)
    left = ("queued", "admitted", "ready", "shipped", "trained", "dead", "dropped_over_age")
    assert [status.groups[name] for name in left] == [0] * len(left)
    assert status.groups["committed"] == STEPS * 2
    assert (status.episodes["trained"], status.episodes["committed"]) == (STEPS * 8, STEPS * 8)
    lines = [json.loads(line) for line in (job.run_dir / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert sorted(e for line in lines for e in line["episodes"]) == sorted(
        f"train/{n:08d}#{m}" for n in range(STEPS * 2) for m in range(4)
    )
    metrics = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(line["staleness_max"] <= job.limits.max_staleness for line in metrics)
    assert all(line["tokens_masked"] == 0 for line in metrics)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_whole_run(tmp_path: Path, tiny_model: str, max_staleness: int) -> None:
    job = await make(tmp_path, tiny_model, max_staleness)
    await run(job, lives=1)
    await check(job)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("call", "number"), [("lease_batch", 3), ("publish_version", 4), ("commit", 4)])
async def test_a_crash_in_a_gap(tmp_path: Path, tiny_model: str, moment: str, call: str, number: int) -> None:
    job = await make(tmp_path, tiny_model, 1)
    job.ledger.crash_at = (moment, call, number)
    await run(job, lives=2)
    await check(job)


async def test_evaluation_lanes_are_run_and_removed(tmp_path: Path, tiny_model: str) -> None:
    made = await make(tmp_path, tiny_model, 1)
    evals = write_rows(tmp_path / "eval.jsonl", 4)
    job = make_job(tmp_path, tiny_model, {"steps": STEPS, "eval_every": 2}, ledger=made.ledger, eval_data=evals)
    await run(job, lives=1)
    lines = [json.loads(line) for line in (job.run_dir / "eval.jsonl").read_text().splitlines()]
    assert lines[-1]["version"] == STEPS
    assert all(line["episodes"] == 4 and line["failed"] == 0 for line in lines)
    assert (await job.ledger.status()).other_lanes == {}
