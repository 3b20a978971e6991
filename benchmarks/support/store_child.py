"""One producer or the consumer of raw Redis or of the queue, as a process. Started by `sides.StoreSide`.

python -m benchmarks.support.store_child {raw|ledger} REDIS_URL  (password in PENSTOCK_BENCH_PASSWORD)
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import redis.asyncio as aioredis
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from benchmarks.support.arrays import payload_arrays
from benchmarks.support.child import answer_questions, own_stdout
from benchmarks.support.queue_calls import GROUP_SIZE, consume_step, leased_work, open_queue, start_run
from penstock.transfer_queue import COMPLETED, RedisTransferQueue, Segment, Trajectory, encode_trajectory

Answer = dict[str, Any]


def trajectory(size: str, episode_id: str, task_id: str) -> Trajectory:
    return Trajectory(episode_id, task_id, (Segment(**payload_arrays(size)),), 1.0, COMPLETED, num_turns=1)


async def timed(calls: Sequence[Callable[[], Awaitable[Any]]]) -> Answer:
    """Makes one call after the other. Times are the machine's clock, so that processes can be compared."""
    each, began = [], time.perf_counter()
    last = began
    for call in calls:
        await call()
        now = time.perf_counter()
        each.append(now - last)
        last = now
    return {"began": began, "ended": last, "each_s": each}


class Raw:
    """SET of the packed trajectory, GET of each; the consumer holds them all in the end, as a trainer does.

    Deleted afterwards, outside of the clock.
    """

    def __init__(self, url: str, password: str) -> None:
        # What the queue's own connections are set to.
        self._client = aioredis.Redis.from_pool(
            aioredis.ConnectionPool.from_url(
                url,
                password=password,
                protocol=2,
                socket_timeout=None,
                socket_connect_timeout=None,
                retry=Retry(NoBackoff(), 0),
            )
        )
        self._packed: dict[str, bytes] = {}
        self._held: list[bytes] = []

    async def start_round(self, run: str, size: str, count: int) -> Answer:
        await self._client.ping()
        return {"bytes": len(self._payload(size))}

    async def get_ready(self, run: str, size: str, worker: int, count: int) -> Answer:
        own = self._own_payloads(size, count)
        await self._client.ping()
        self._sets = [partial(self._client.set, f"raw:{worker}:{n}", payload) for n, payload in enumerate(own)]
        return {}

    async def produce(self) -> Answer:
        return await timed(self._sets)

    async def consume(self, size: str, workers: int, count: int) -> Answer:
        self._keys = [f"raw:{worker}:{n}" for worker in range(workers) for n in range(count // workers)]
        answer = await timed([partial(self._get, key, len(self._payload(size))) for key in self._keys])
        return {"consume_s": answer["ended"] - answer["began"], "each_s": answer["each_s"]}

    async def end_round(self) -> Answer:
        await self._client.unlink(*self._keys)
        self._held = []
        return {}

    async def _get(self, key: str, length: int) -> None:
        payload = await self._client.get(key)
        if not isinstance(payload, bytes) or len(payload) != length:
            raise ValueError(f"{key}: {len(payload or b'')} bytes came back, {length} were set")
        self._held.append(payload)

    def _own_payloads(self, size: str, count: int) -> list[bytes]:
        """Each in memory of its own, as trajectories are: one that is sent again and again stays in the caches."""
        return [bytes(bytearray(self._payload(size))) for _ in range(count)]

    def _payload(self, size: str) -> bytes:
        if size not in self._packed:
            self._packed = {size: encode_trajectory(trajectory(size, "train/00000000#0", "train/00000000"))}
        return self._packed[size]


class Queues:
    """`complete` of each trajectory; then `lease_batch`, `read`, `publish_version` and `commit` of their step."""

    def __init__(self, url: str, password: str) -> None:
        self._url = url
        self._password = password
        self._queue: RedisTransferQueue | None = None

    async def start_round(self, run: str, size: str, count: int) -> Answer:
        self._queue = await open_queue(self._url, self._password, run)
        await start_run(self._queue, count // GROUP_SIZE)
        return {}

    async def get_ready(self, run: str, size: str, worker: int, count: int) -> Answer:
        if self._queue is not None:
            await self._queue.close()
        self._queue = queue = await open_queue(self._url, self._password, run)
        leases = await leased_work(queue, f"producer-{worker}", count)
        self._finished = [(lease, trajectory(size, lease.episode_id, lease.task.task_id)) for lease in leases]
        return {}

    async def produce(self) -> Answer:
        assert self._queue is not None
        return await timed([partial(self._queue.complete, lease, work) for lease, work in self._finished])

    async def consume(self, size: str, workers: int, count: int) -> Answer:
        assert self._queue is not None
        began = time.perf_counter()
        trajectories = await consume_step(self._queue, step=0)
        took = time.perf_counter() - began
        length = len(payload_arrays(size)["response_ids"])
        if len(trajectories) != count or any(len(t.segments[0].response_ids) != length for t in trajectories):
            raise ValueError(f"{len(trajectories)} trajectories came back, {count} were completed")
        return {"consume_s": took, "each_s": [took / count] * count}

    async def end_round(self) -> Answer:
        assert self._queue is not None
        await self._queue.drop_run()
        await self._queue.close()
        self._queue = None
        return {}


def main() -> None:
    replies = own_stdout()
    kind, url = sys.argv[1:]
    stores: dict[str, Callable[[str, str], Any]] = {"raw": Raw, "ledger": Queues}
    store = stores[kind](url, os.environ["PENSTOCK_BENCH_PASSWORD"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_questions(replies, lambda question: runner.run(getattr(store, question.pop("do"))(**question)))


if __name__ == "__main__":
    main()
