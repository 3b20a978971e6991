"""A million episodes through one queue: is anything left behind?

    penstock bench million --json

    this process   submit ──► (workers: lease, complete) ──► lease_batch, read, publish_version, commit
    two workers    processes of their own, 64 episodes at a time

Every episode must come out exactly once, and Redis must hold afterwards what it held before. Before and after are
counted with the same clients connected, after a short run has loaded the scripts.

PENSTOCK_BENCH_EPISODES sets the number of episodes, rounded up to whole steps.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
import uvloop

from benchmarks.support.child import Child
from benchmarks.support.comparison import merge_peaks, say
from benchmarks.support.measure import family, peaks_mb
from benchmarks.support.queue_calls import open_queue, tasks
from penstock.transfer_queue import (
    Announcement,
    Batch,
    DataCursor,
    Limits,
    QueueError,
    RedisServer,
    RedisTransferQueue,
    Waiting,
)

EPISODES = 1_000_000
GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS = 8, 125, 2
EPISODES_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
STEPS_AHEAD = MAX_STALENESS + 2
"""Submitted and not yet trained: workers never wait for tasks."""
WORKERS = 2
WARM_UP_STEPS = 2
POLL_S = 0.005
STEP_TIMEOUT_S = 300.0
FREED_TIMEOUT_S = 60.0
NEVER_EXPIRES = -1
"""What Redis says of the time that such a key has left."""


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


async def _measure() -> dict[str, Any]:
    steps = -(-int(os.environ.get("PENSTOCK_BENCH_EPISODES", EPISODES)) // EPISODES_PER_STEP)
    async with _store() as store:
        await _whole_run(store, "warm-up", WARM_UP_STEPS)
        await store.drop("warm-up")
        before = await store.footprint()
        began = time.perf_counter()
        account = await _whole_run(store, "million", steps)
        took = time.perf_counter() - began
        committed = await store.footprint()
        await store.drop("million")
        dropped = await store.footprint()
    return {
        "bench": "million",
        "ratio": {
            "memory_committed_over_before": round(committed.used_bytes / before.used_bytes, 4),
            "memory_dropped_over_before": round(dropped.used_bytes / before.used_bytes, 4),
        },
        "figures": _figures(account, took, {"before": before, "committed": committed, "dropped": dropped}),
        "setup": _setup(steps),
    }


# the store ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Footprint:
    """What Redis holds while nobody works."""

    used_bytes: int
    keys: list[str]
    """Those that stay; the answer to a lease, kept for a client that asks again, expires by itself."""


class Store:
    """A redis-server and one client that watches it."""

    def __init__(self, server: RedisServer, password: str, client: aioredis.Redis) -> None:
        self.server = server
        self.password = password
        self._client = client

    async def open(self, run: str) -> RedisTransferQueue:
        return await open_queue(self.server.url, self.password, run)

    async def drop(self, run: str) -> None:
        queue = await self.open(run)
        try:
            await queue.drop_run()
        finally:
            await queue.close()

    async def used_bytes(self) -> int:
        return int((await self._client.info("memory"))["used_memory"])

    async def footprint(self) -> Footprint:
        """Once what is freed in the background is free and this client is the only one."""
        async with asyncio.timeout(FREED_TIMEOUT_S):
            while not await self._at_rest():  # noqa: ASYNC110 - another process: there is no event
                await asyncio.sleep(0.1)
        keys = [key async for key in self._client.scan_iter(count=1000) if await self._client.ttl(key) == NEVER_EXPIRES]
        return Footprint(await self.used_bytes(), sorted(key.decode() for key in keys))

    async def _at_rest(self) -> bool:
        info = await self._client.info()
        busy = ("lazyfree_pending_objects", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
        return info["connected_clients"] == 1 and not any(int(info[name]) for name in busy)


@asynccontextmanager
async def _store() -> AsyncIterator[Store]:
    password = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with (
            RedisServer(Path(folder), password) as server,
            aioredis.Redis.from_url(server.url, password=password, single_connection_client=True) as client,
        ):
            yield Store(server, password, client)


# the run -----------------------------------------------------------------------------------------------------------
@dataclass
class Account:
    """Which episodes were trained, and the most that Redis held."""

    trained: bytearray
    """Per episode 0 or 1, by task number and member."""
    most_bytes: int = 0
    completed: int = 0
    peaks: dict[str, float] = field(default_factory=dict)

    def train(self, episode_id: str) -> None:
        task, _, member = episode_id.rpartition("#")
        at = int(task.removeprefix("train/")) * GROUP_SIZE + int(member)
        if self.trained[at]:
            raise QueueError(f"{episode_id} was handed out in two steps")
        self.trained[at] = 1


async def _whole_run(store: Store, run: str, steps: int) -> Account:
    account = Account(bytearray(steps * EPISODES_PER_STEP))
    queue = await store.open(run)
    try:
        await queue.create_run(Limits(GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS), "{}")
        async with _workers(store) as workers:
            async with asyncio.TaskGroup() as group:
                question = {"run": run, "steps": steps}
                working = [group.create_task(worker.ask(question, timeout_s=24 * 3600)) for worker in workers]
                await _train(store, queue, steps, account)
            account.completed = sum(task.result()["completed"] for task in working)
            pids = [pid for worker in workers for pid in family(worker.pid)]
            merge_peaks(account.peaks, peaks_mb([os.getpid(), store.server.pid or 0, *pids]))
    finally:
        await queue.close()
    if missing := account.trained.count(0):
        raise QueueError(f"{missing} of {len(account.trained)} episodes never came out")
    return account


@asynccontextmanager
async def _workers(store: Store) -> AsyncIterator[list[Child]]:
    workers: list[Child] = []
    try:
        for number in range(WORKERS):
            arguments = ("benchmarks.support.worker_child", f"worker-{number}", store.server.url)
            workers.append(await Child.module(*arguments, env={"PENSTOCK_BENCH_PASSWORD": store.password}))
        yield workers
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


async def _train(store: Store, queue: RedisTransferQueue, steps: int, account: Account) -> None:
    """The data stream and the trainer in one loop: submit ahead, take a step, account for it, commit it."""
    submitted, began = 0, time.perf_counter()
    for step in range(steps):
        while submitted < min(steps, step + STEPS_AHEAD):
            first = submitted * GROUPS_PER_STEP
            await queue.submit(tasks(first, GROUPS_PER_STEP), DataCursor(0, first + GROUPS_PER_STEP))
            submitted += 1
        batch = await _batch(queue, step)
        for trajectory in await queue.read([episode for group in batch.groups for episode in group]):
            account.train(trajectory.episode_id)
        account.most_bytes = max(account.most_bytes, await store.used_bytes())
        await queue.publish_version(Announcement(step + 1, {}))
        await queue.commit(step + 1)
        if (step + 1) % max(1, steps // 20) == 0:
            done = (step + 1) * EPISODES_PER_STEP
            say(f"million: {done} episodes, {done / (time.perf_counter() - began):.0f} per second")


async def _batch(queue: RedisTransferQueue, step: int) -> Batch:
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while isinstance(batch := await queue.lease_batch(step), Waiting):  # noqa: ASYNC110 - workers are processes
            await asyncio.sleep(POLL_S)
    return batch


# what it comes to --------------------------------------------------------------------------------------------------
def _figures(account: Account, took_s: float, footprints: dict[str, Footprint]) -> dict[str, Any]:
    return {
        "episodes": len(account.trained),
        "trained_once": sum(account.trained),
        "completed": account.completed,
        "episodes_per_s": round(len(account.trained) / took_s, 1),
        "most_used_bytes": account.most_bytes,
        "used_bytes": {when: footprint.used_bytes for when, footprint in footprints.items()},
        "keys": {when: footprint.keys for when, footprint in footprints.items()},
        "peak_rss_mb": account.peaks,
    }


def _setup(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "group_size": GROUP_SIZE,
        "groups_per_step": GROUPS_PER_STEP,
        "max_staleness": MAX_STALENESS,
        "workers": WORKERS,
        "appendfsync": "everysec",
    }
