"""The ledger against raw Redis: the same bytes by SET, GET, DEL, and by complete → lease_batch → read → commit.

penstock bench queue --json
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import redis.asyncio as redis

from penstock.transfer_queue.codec import encode_trajectory
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Announcement, Batch, Limits
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.redis_server import RedisServer
from penstock.transfer_queue.trajectory import COMPLETED, DataCursor, Segment, Task, Trajectory

SIZES = {"32kb": 3_500, "1mb": 110_000}
"""Response tokens whose packed trajectory is about that large."""
GROUPS, MEMBERS, ROUNDS = 8, 4, 5


@dataclass(frozen=True)
class Store:
    url: str
    password: str


def measure() -> dict[str, Any]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        password = secrets.token_urlsafe(16)
        async with RedisServer(Path(folder), password) as server:
            store = Store(server.url, password)
            figures: dict[str, Any] = {}
            ratio: dict[str, float] = {}
            for name, tokens in SIZES.items():
                rounds = [await _one_round(store, tokens, f"{name}-{number}") for number in range(ROUNDS)]
                raw, ledger = (median(r[key] for r in rounds) for key in ("raw_mb_s", "ledger_mb_s"))
                figures |= {f"raw_redis_{name}_mb_per_s": round(raw, 1), f"ledger_{name}_mb_per_s": round(ledger, 1)}
                ratio[f"ledger_over_raw_redis_{name}"] = round(ledger / raw, 3)
    setup = {"groups": GROUPS, "members": MEMBERS, "rounds": ROUNDS, "appendfsync": "everysec", "producers": 1}
    return {"bench": "queue", "ratio": ratio, "figures": figures, "setup": setup}


async def _one_round(store: Store, tokens: int, run: str) -> dict[str, float]:
    """Both in the same second, so that a noisy machine disturbs both alike."""
    example = _trajectory("bench#0", "bench", tokens)
    megabytes = len(encode_trajectory(example)) * GROUPS * MEMBERS / 1e6
    raw_s = await _raw(store, encode_trajectory(example))
    ledger_s = await _through_ledger(store, tokens, run)
    return {"raw_mb_s": megabytes / raw_s, "ledger_mb_s": megabytes / ledger_s}


async def _raw(store: Store, payload: bytes) -> float:
    client = redis.from_url(store.url, password=store.password)
    began = time.perf_counter()
    for number in range(GROUPS * MEMBERS):
        await client.set(f"raw:{number}", payload)
    for number in range(GROUPS * MEMBERS):
        await client.get(f"raw:{number}")
    await client.delete(*[f"raw:{number}" for number in range(GROUPS * MEMBERS)])
    elapsed = time.perf_counter() - began
    await client.aclose()
    return elapsed


async def _through_ledger(store: Store, tokens: int, run: str) -> float:
    ledger = await RedisLedger.connect(store.url, run, TransferQueueConfig(), password=store.password)
    await ledger.create_run(Limits(MEMBERS, GROUPS, max_staleness=0), "{}")
    tasks = [Task(f"train/{n:08d}", "train", [{"role": "user", "content": "?"}], "bench", "0") for n in range(GROUPS)]
    await ledger.submit(tasks, cursor=DataCursor(0, GROUPS))
    leases = await ledger.lease_episodes("bench", GROUPS * MEMBERS, 0)
    trajectories = [_trajectory(lease.episode_id, lease.task.task_id, tokens) for lease in leases]
    began = time.perf_counter()
    for lease, trajectory in zip(leases, trajectories, strict=True):
        await ledger.complete(lease, trajectory)
    batch = await ledger.lease_batch(0)
    assert isinstance(batch, Batch)
    await ledger.read([episode for group in batch.groups for episode in group])
    await ledger.publish_version(Announcement(1, {}))
    await ledger.commit(1)
    elapsed = time.perf_counter() - began
    await ledger.drop_run()
    await ledger.close()
    return elapsed


def _trajectory(episode_id: str, task_id: str, tokens: int) -> Trajectory:
    rng = np.random.default_rng(0)
    segment = Segment(
        prompt_ids=rng.integers(0, 50_000, 100, dtype=np.int32),
        response_ids=rng.integers(0, 50_000, tokens, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=np.uint8),
        response_logprobs=-rng.random(tokens, dtype=np.float32),
        version_spans=np.array([[0, 0, tokens]], dtype=np.int32),
        turn_starts=np.array([0], dtype=np.int32),
    )
    return Trajectory(episode_id, task_id, (segment,), 1.0, COMPLETED, num_turns=1)
