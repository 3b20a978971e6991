"""kill -9 of redis-server under load: everything acknowledged is still there, everything else is still owed."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger_samples import tasks, trajectory, turn

from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Announcement, Batch, LeaseLost, Limits
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.crash]
PASSWORD = "a-test-password"
CONFIG = TransferQueueConfig(deadline_s=30.0)
LIMITS = Limits(group_size=4, groups_per_step=4, max_staleness=2, lease_ttl_s=0.5)
STEPS = 30


@dataclass
class Books:
    """What the clients were told."""

    acknowledged: set[str] = field(default_factory=set)
    step_of: dict[str, int] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)


async def work(ledger: RedisLedger, name: str, books: Books) -> None:
    while True:
        latest = await ledger.latest_version()
        leases = await ledger.lease_episodes(name, 6, latest.version if latest else 0)
        for lease in leases:
            try:
                await ledger.journal(lease, turn(1))
                await ledger.complete(lease, trajectory(lease))
            except LeaseLost:
                continue
            books.acknowledged.add(lease.episode_id)
        await asyncio.sleep(0.002 if leases else 0.02)


async def train(ledger: RedisLedger, books: Books) -> None:
    for step in range(STEPS):
        while not isinstance(batch := await ledger.lease_batch(step), Batch):
            await asyncio.sleep(0.005)
        episodes = [episode for group in batch.groups for episode in group]
        assert len(await ledger.read(episodes)) == len(episodes)
        books.twice += [episode for episode in episodes if books.step_of.setdefault(episode, step) != step]
        await ledger.publish_version(Announcement(step + 1, {}))
        if step % 5 == 4:
            await ledger.commit(step + 1)


async def kill_now_and_then(server: RedisServer, chance: random.Random, kills: int) -> None:
    for _ in range(kills):
        await asyncio.sleep(chance.uniform(0.05, 0.4))
        await server.kill()
        await server.restart()


async def test_redis_killed_under_load(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6)))
    kills = int(os.environ.get("PENSTOCK_TEST_KILLS", "4"))
    print(f"seed {seed}, {kills} kills")
    books, groups = Books(), STEPS * LIMITS.groups_per_step
    async with RedisServer(tmp_path, PASSWORD, appendfsync="always") as server:
        ledger = await RedisLedger.connect(server.url, "crash", CONFIG, PASSWORD)
        await ledger.create_run(LIMITS, "x")
        await ledger.submit(tasks(groups), cursor=groups)
        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            workers = [group.create_task(work(ledger, f"w{number}", books)) for number in range(3)]
            await asyncio.gather(train(ledger, books), kill_now_and_then(server, random.Random(seed), kills))
            for worker in workers:
                worker.cancel()
        status = await ledger.status()
        await ledger.close()
    print(status)
    assert books.twice == []
    assert set(books.step_of) == books.acknowledged
    assert len(books.acknowledged) == groups * LIMITS.group_size
    assert status.groups["committed"] == status.groups["submitted"] == groups
    assert (status.episodes["completed"], status.episodes["committed"]) == (480, 480)
    assert (status.episodes["leased"], status.episodes["queued"], status.bytes) == (0, 0, 0)
