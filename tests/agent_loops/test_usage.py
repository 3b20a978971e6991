"""A worker reports by episode how long its boxes were open, and the calls of judges."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.agent_loops.tracing import begin_trace, use
from penstock.agent_loops.usage import WorkerUsage, observed
from penstock.testing import FakeSandbox, MemoryTransferQueue


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


async def box_seconds(queue: MemoryTransferQueue) -> dict[str, float]:
    sums = Counter[str]()
    for entry in await queue.ledger(0):
        assert entry.usage is not None
        for name, amounts in entry.usage.amounts.items():
            sums[name] += amounts["box_s"]  # type: ignore[assignment]
    return dict(sums)


async def test_an_open_box_is_its_episodes_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queue, boxes = Clock(), MemoryTransferQueue(), WorkerUsage("agent-0")
    monkeypatch.setattr("penstock.agent_loops.usage.time", clock)
    sandbox = observed(FakeSandbox(), boxes)

    async def episode(name: str) -> None:
        begin_trace(episode_id=name)
        session = await sandbox.start(name)
        clock.now += 2.0
        await boxes.report(queue)
        clock.now += 1.0
        await session.close()
        clock.now += 5.0

    await asyncio.create_task(episode("train/0#0"))
    await asyncio.create_task(episode("train/0#1"))
    await sandbox.start("a reward's own")
    clock.now += 4.0
    await boxes.report(queue)
    assert await box_seconds(queue) == {"train/0#0": 3.0, "train/0#1": 3.0, "others": 4.0}


async def test_a_box_that_cannot_be_closed_is_not_open_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queue, boxes = Clock(), MemoryTransferQueue(), WorkerUsage("agent-0")
    monkeypatch.setattr("penstock.agent_loops.usage.time", clock)

    async def fails() -> None:
        raise RuntimeError("gone")

    session = await observed(FakeSandbox(), boxes).start("a")
    monkeypatch.setattr(session._inner, "close", fails)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        await session.close()
    clock.now += 9.0
    async with boxes.reported(queue):
        pass
    assert await box_seconds(queue) == {"others": 0.0}


async def test_what_an_episode_uses_is_counted_for_it_and_nothing_outside_of_one() -> None:
    queue, usage = MemoryTransferQueue(), WorkerUsage("agent-0")

    async def episode() -> None:
        begin_trace(episode_id="train/0#0", on_use=usage.add)
        for _ in range(2):
            await asyncio.create_task(asyncio.to_thread(use, "judged_calls", 1))

    await asyncio.create_task(episode())
    use("judged_calls", 1)
    await usage.report(queue)
    (entry,) = await queue.ledger(0)
    assert entry.usage is not None
    assert entry.usage.amounts == {"train/0#0": {"judged_calls": 2}}
