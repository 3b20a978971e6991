"""What an idle rollout server reads of the queue while no version is published: bytes per second.

The announcement is of a mixture of experts, Qwen3-30B-A3B, whose manifest has some megabytes. The queue is a real
Redis, whose own count of the bytes that it sent is taken. The reader is the server's own updater at the server's pace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.asyncio import Redis

from benchmarks.support.queue_calls import make_ready, open_queue
from penstock.rollout_server import PULL_S
from penstock.transfer_queue import Announcement, Limits, RedisTransferQueue
from penstock.weight_sync import ChainFile, LoadReport, Manifest, TensorEntry, WeightUpdater, no_fetch, state_of

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 48, 128, 2048, 768
IDLE_S = 6.0
T = TypeVar("T")


async def measure_idle(redis: tuple[str, str]) -> dict[str, Any]:
    """Bytes per second with the manifest fetched where it changed, and where it is fetched at each look."""
    url, password = redis
    queue = await open_queue(url, password, "idle")
    await queue.create_run(Limits(1, 1, max_staleness=0), "{}")
    await make_ready(queue, 1)
    manifest = experts_manifest()
    await queue.publish_version(Announcement(1, manifest.as_dict()))
    sent = RedisSent(url, password)
    try:
        held = await _idle(queue, sent)
        again = await _reading_all(queue, sent)
    finally:
        await sent.close()
        await queue.close()
    return {
        "tensors": len(manifest.tensors),
        "looks_per_s": round(1 / PULL_S, 2),
        "bytes_per_s": round(held, 1),
        "bytes_per_s_reading_the_manifest_each_time": round(again, 1),
    }


class RedisSent:
    """Redis's count of the bytes that it sent, without those of the counting."""

    def __init__(self, url: str, password: str) -> None:
        self._redis = Redis.from_url(url, password=password)

    async def now(self) -> int:
        return int((await self._redis.info("stats"))["total_net_output_bytes"])

    async def close(self) -> None:
        await self._redis.aclose()

    async def of(self, looks: Awaitable[None]) -> float:
        """Bytes that `looks` makes Redis send."""
        before = await self.now()
        own = await self.now() - before
        await looks
        return await self.now() - before - 2 * own


async def _idle(queue: RedisTransferQueue, sent: RedisSent) -> float:
    updater = _updater(queue)
    engine = IdleEngine()
    await updater.pull(engine)

    async def look() -> None:
        if not await updater.pull(engine):
            raise RuntimeError(f"the updater does not hold the version: {updater.cause}")

    return await _rate(sent, look)


async def _reading_all(queue: RedisTransferQueue, sent: RedisSent) -> float:
    async def look() -> None:
        await queue.latest_version()

    return await _rate(sent, look)


async def _rate(sent: RedisSent, look: Any) -> float:
    began = time.perf_counter()

    async def looks() -> None:
        while time.perf_counter() - began < IDLE_S:
            await look()
            await asyncio.sleep(PULL_S)

    return await sent.of(looks()) / (time.perf_counter() - began)


class IdleEngine:
    """An engine that loads in no time."""

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        return LoadReport(version=manifest.version, fetch_s=0, pause_s=0, load_s=0, in_flight=0)


class _Direct:
    def __init__(self, queue: RedisTransferQueue) -> None:
        self.queue = queue

    async def ask(self, call: Awaitable[T]) -> T:
        return await call


class _Counts:
    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.lag = Gauge("lag", "versions", registry=registry)
        self.refused = Counter("refused", "versions", registry=registry)

    def updated(self, report: LoadReport) -> None:
        return


def _updater(queue: RedisTransferQueue) -> WeightUpdater:
    updater = WeightUpdater("idle", _Direct(queue), no_fetch, _Counts())
    updater.begin(0)
    return updater


def experts_manifest() -> Manifest:
    """Of a full version, published over HTTP; its checksums are of no file."""
    entries = tuple(
        TensorEntry(name, shape, "bfloat16", f"{number:016x}") for number, (name, shape) in enumerate(_shapes())
    )
    file = ChainFile(
        1, None, "http://10.0.0.1:8000/weights-00000001.safetensors", 61_000_000_000, "0" * 16, state_of(entries)
    )
    return Manifest("http", (file,), entries)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (151_936, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, rows in (("q", 4096), ("k", 512), ("v", 512)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, HIDDEN)
        yield f"{name}.self_attn.o_proj.weight", (HIDDEN, 4096)
        yield f"{name}.self_attn.q_norm.weight", (128,)
        yield f"{name}.self_attn.k_norm.weight", (128,)
        yield f"{name}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            yield f"{name}.mlp.experts.{expert}.gate_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{name}.mlp.experts.{expert}.up_proj.weight", (INTERMEDIATE, HIDDEN)
            yield f"{name}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        yield f"{name}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (151_936, HIDDEN)
