"""What only the queue in memory can show, with a clock of its own: times to the moment, numbers that are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import LIMITS, at, tasks

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Head, RunIdentity, RunRecord, ServerInfo, TurnCall

TTL_S = 100.0
TIMED = replace(LIMITS, group_size=3, lease_ttl_s=TTL_S)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def queue(clock: Clock) -> MemoryTransferQueue:
    """With four groups of three episodes."""
    made = MemoryTransferQueue(registry_ttl_s=6.0, clock=clock)
    await made.create_run(TIMED, "config: 1")
    await made.submit(tasks(4), cursor=at(4))
    return made


async def names(queue: MemoryTransferQueue, worker: str, count: int) -> list[str]:
    return [lease.episode_id for lease in await queue.lease_episodes(worker, count, 0)]


async def test_memory_lease_ends_with_its_time(queue: MemoryTransferQueue, clock: Clock) -> None:
    (lease,) = await queue.lease_episodes("first", 1, 0)
    clock.now += TTL_S - 1
    assert await names(queue, "second", 1) == ["train/0000#1"]
    clock.now += 1
    assert await names(queue, "second", 1) == [lease.episode_id]
    assert (await queue.status()).episodes["expired"] == 1


async def test_memory_head_ends_with_its_time(queue: MemoryTransferQueue, clock: Clock) -> None:
    assert await queue.claim_head("first", 30.0) is None
    clock.now += 29.5
    assert await queue.claim_head("second", 30.0) == Head("first", 0.5)
    clock.now += 0.5
    assert await queue.claim_head("second", 30.0) is None
    assert await queue.claim_head("first", 30.0) == Head("second", 30.0)


async def test_memory_server_ends_with_its_time(queue: MemoryTransferQueue, clock: Clock) -> None:
    await queue.heartbeat(ServerInfo("one", "http://a", 0))
    clock.now += 5.5
    assert [info.age_s for info in await queue.servers()] == [5.5]
    clock.now += 0.5
    assert await queue.servers() == []


async def test_memory_turn_ends_with_its_time(queue: MemoryTransferQueue, clock: Clock) -> None:
    await queue.take_turn(TurnCall("engine", "a", 1, holds=True, ttl_s=10.0))
    clock.now += 9.5
    assert [one.holder for one in (await queue.turns()).holders] == ["a"]
    clock.now += 0.5
    assert (await queue.turns()).holders == ()
    assert [report.at_s for report in await queue.turn_reports()] == [1000.0]


async def test_memory_run_knows_its_age(clock: Clock) -> None:
    queue, identity = MemoryTransferQueue(clock=clock), RunIdentity("a1", "hash", "model")
    await queue.create_run(LIMITS, "x", identity)
    clock.now += 5
    assert await queue.create_run(LIMITS, "x", identity) == RunRecord(identity, 5.0)
    clock.now += 2
    assert await queue.create_run(LIMITS, "x", identity) == RunRecord(identity, 7.0)


async def test_memory_drops_a_run_and_counts_it(queue: MemoryTransferQueue) -> None:
    assert await queue.drop_run() == 5
    assert await queue.drop_run() == 0
