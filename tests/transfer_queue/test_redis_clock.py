"""Redis's own clock steps by an hour, forward or back: nobody who is alive is lost by it, and nobody dead stays.

The queue's functions are loaded with one line changed: what they read as Redis's TIME is moved by a key of the test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from faults.redis_clock import STEP_KEY, movable_redis_clock
from queue_samples import LIMITS, at, tasks, trajectory

from penstock.transfer_queue import Lease, RedisTransferQueue, ServerInfo

pytestmark = pytest.mark.redis
HOUR_S = 3600
TTL_S = 0.2
Step = Callable[[int], Awaitable[None]]


@pytest.fixture(autouse=True)
def movable_time() -> Iterator[None]:
    with movable_redis_clock():
        yield


@pytest.fixture
async def queue(movable_time: None, connect_redis) -> RedisTransferQueue:
    return await connect_redis(registry_ttl_s=TTL_S)


@pytest.fixture
def step(queue: RedisTransferQueue) -> Step:
    async def move(seconds: int) -> None:
        await queue._connection.command("SET", queue._keys.index + STEP_KEY, seconds)

    return move


async def start(queue: RedisTransferQueue, lease_ttl_s: float) -> list[Lease]:
    await queue.create_run(replace(LIMITS, lease_ttl_s=lease_ttl_s), "x")
    await queue.submit(tasks(2), cursor=at(2))
    return await queue.lease_episodes("first", 4, 0)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_leases_survive_a_step(queue: RedisTransferQueue, step: Step, by_s: int) -> None:
    leases = await start(queue, lease_ttl_s=30.0)
    await step(by_s)
    assert await queue.lease_episodes("second", 4, 0) == []
    assert await queue.renew(leases) == []
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    assert (await queue.status()).episodes["expired"] == 0


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_leases_of_the_dead_end_after_a_step(queue: RedisTransferQueue, step: Step, by_s: int) -> None:
    leases = await start(queue, TTL_S)
    await step(by_s)
    found: list[Lease] = []
    async with asyncio.timeout(60):
        while len(found) < len(leases):
            found += await queue.lease_episodes("second", 4, 0)
            await asyncio.sleep(TTL_S / 4)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_the_registry_survives_a_step(queue: RedisTransferQueue, step: Step, by_s: int) -> None:
    await queue.create_run(LIMITS, "x")
    queue._registry_ttl_ms = 30_000
    await queue.heartbeat(ServerInfo("alive", "http://a", 0))
    await step(by_s)
    assert [info.server_id for info in await queue.servers()] == ["alive"], "as readers see it"
    await queue.heartbeat(ServerInfo("other", "http://b", 0))
    assert [info.server_id for info in await queue.servers()] == ["alive", "other"]


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_dead_servers_are_forgotten_after_a_step(queue: RedisTransferQueue, step: Step, by_s: int) -> None:
    await queue.create_run(LIMITS, "x")
    await queue.heartbeat(ServerInfo("dead", "http://a", 0))
    await step(by_s)
    async with asyncio.timeout(60):
        while any(info.server_id == "dead" for info in await queue.servers()):
            await queue.heartbeat(ServerInfo("alive", "http://b", 0))
            await asyncio.sleep(TTL_S / 4)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_a_head_survives_a_step(queue: RedisTransferQueue, step: Step, by_s: int) -> None:
    await queue.claim_head("first", 30.0)
    await step(by_s)
    head = await queue.claim_head("second", 30.0)
    assert head is not None
    assert 0 < head.left_s <= 30.0


async def test_steps_there_and_back_add_up_to_nothing(queue: RedisTransferQueue, step: Step) -> None:
    leases = await start(queue, lease_ttl_s=30.0)
    for by_s in (HOUR_S, 0, -HOUR_S, 0) * 2:
        await step(by_s)
        assert await queue.lease_episodes("second", 4, 0) == []
        assert await queue.renew(leases) == []
    assert (await queue.status()).episodes["expired"] == 0


async def test_fences_grow_though_the_clock_went_back(queue: RedisTransferQueue, step: Step) -> None:
    """Another server has taken over, whose clock is an hour behind what the fences came from."""
    leases = await start(queue, lease_ttl_s=30.0)
    counters = queue._keys.counters
    fences = [lease.fence for lease in leases]
    for by_s, server in ((0, 1), (-HOUR_S, 2)):
        await step(by_s)
        await queue._connection.command("HSET", counters, "server", server)
        await queue.release(leases[0])
        (leases[0],) = await queue.lease_episodes("second", 1, 0)
        fences.append(leases[0].fence)
    assert fences == sorted(set(fences))
    assert fences[-2] / 10_000 == pytest.approx(time.time(), abs=600), "ten a millisecond"
    assert 1 < fences[-1] - fences[-2] <= 1_000_010
