"""Redis is killed, paused, full, or loses its newest writes: every episode is finished or still owed, none twice."""

from __future__ import annotations

import asyncio
import random

import pytest

from faults.episodes import cursor_at, next_entry, task_at, trajectory_of
from faults.gaps import ANYWHERE
from faults.havoc import fill_redis, kill_redis, lose_tail, pause_redis
from faults.rounds import seeds
from faults.stage import Stage
from penstock.transfer_queue import Announcement, Batch, JournalEntry, Lease, Limits

pytestmark = [pytest.mark.redis, pytest.mark.crash]
WAIT = Limits(group_size=3, groups_per_step=2, max_staleness=1, lease_ttl_s=0.6, max_attempts=2)


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_redis_killed_under_load(fsync: str) -> None:
    for seed in seeds(2):
        async with Stage(seed, fsync=fsync) as stage:
            kills = stage.every(0.35, lambda: kill_redis(stage.server, stage.chance), times=5, name="redis")
            account = await stage.play(kills)
            print(account.line)
            account.check()
            assert account.kills["redis"] == 5
            assert account.trained
            assert await stage.leftovers() == []


@pytest.mark.parametrize("seconds", [2.0, 30.0])
async def test_redis_paused_for_longer_than_leases_last(seconds: float) -> None:
    """Nobody's lease is lost to a pause, and no client gives up."""
    for seed in seeds(1):
        async with Stage(seed, limits=WAIT) as stage:
            account = await stage.play(
                stage.every(0.3, lambda: pause_redis(stage.server, seconds), times=1, name="pause")
            )
            print(account.line)
            account.check()
            assert account.steps > 1


async def test_redis_full() -> None:
    for seed in seeds(1):
        async with Stage(seed) as stage:
            account = await stage.play(stage.every(0.4, lambda: fill_redis(stage.client, 0.6), times=3, name="full"))
            print(account.line)
            account.check()


async def test_commits_go_on_in_a_full_redis() -> None:
    """They are what makes room. What needs room waits until there is some, and is acknowledged then."""
    async with Stage(0, limits=WAIT) as stage:
        queue, client = stage.queue, stage.client
        await queue.submit([task_at(number) for number in range(3)], cursor_at(3))
        leases = await queue.lease_episodes("worker", 9, 0)
        for lease in leases[:6]:
            await queue.complete(lease, trajectory_of(lease, [sampled(lease)], 1.0))
        batch = await queue.lease_batch(0)
        assert isinstance(batch, Batch)
        await client.config_set("maxmemory", 1)
        waiting = asyncio.create_task(queue.complete(leases[6], trajectory_of(leases[6], [sampled(leases[6])], 1.0)))
        await queue.publish_version(Announcement(1, {}))
        await queue.commit(1)
        status = await queue.status()
        assert (status.version, status.committed_step, status.episodes["committed"]) == (1, 1, 6)
        assert not waiting.done()
        await client.config_set("maxmemory", 0)
        await waiting
        assert await queue.held() == {leases[6].episode_id}


def sampled(lease: Lease) -> JournalEntry:
    entry = next_entry(lease.episode_id, [], 0, random.Random(lease.episode_id))
    assert entry is not None
    return entry


async def test_tail_of_the_append_only_file_lost() -> None:
    """A machine with ``everysec`` dies: what was acknowledged may be owed again, and nothing is trained twice."""
    for seed in seeds(2):
        async with Stage(seed, fsync="everysec", may_lose_tail=True) as stage:
            losses = stage.every(0.3, lambda: lose_tail(stage.server, stage.chance), times=4, name="tail")
            account = await stage.play(losses, gaps=[ANYWHERE] * 2)
            print(account.line)
            account.check()
            assert await stage.leftovers() == []
