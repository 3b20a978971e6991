"""A trainer's rank reports each second of its devices once, for the step that it worked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.testing import MemoryTransferQueue
from penstock.trainer.usage import RankUsage
from penstock.transfer_queue import IDLE


@pytest.mark.parametrize(("shares_devices", "idle"), [(False, {"idle": 4.0}), (True, {})])
async def test_seconds_are_those_of_what_was_begun_last(
    monkeypatch: pytest.MonkeyPatch, shares_devices: bool, idle: dict[str, float]
) -> None:
    queue, seconds = MemoryTransferQueue(), iter([1.0, 2.0, 4.0, 8.0])
    usage = RankUsage(0, queue, shares_devices=shares_devices)
    monkeypatch.setattr(usage._clock, "elapsed_s", lambda: next(seconds))
    async with usage.reported():
        usage.begin("step/0")
        usage.begin(IDLE)
        usage.begin("step/1")
    (entry,) = await queue.ledger(0)
    assert entry.usage is not None
    assert entry.usage.process.startswith("trainer-0 ")
    sums = {name: amounts["trainer_s"] for name, amounts in entry.usage.amounts.items()}
    assert sums == {"start and end": 1.0, "step/0": 2.0, "step/1": 8.0, **idle}


async def test_a_rank_counts_one_of_the_gpus_that_all_ranks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    now = 100.0
    monkeypatch.setattr("penstock.common.process.time", SimpleNamespace(monotonic=lambda: now))
    queue = MemoryTransferQueue()
    async with RankUsage(1, queue, shares_devices=False).reported():
        now = 107.0
    (entry,) = await queue.ledger(0)
    assert entry.usage is not None
    assert entry.usage.amounts == {"start and end": {"trainer_s": 7.0}}
