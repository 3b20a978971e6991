"""Weight swaps under load: how long each server pauses, and what another server decodes meanwhile.

two runs of one server each, so that an announcement reaches one server alone

other   decode ─────────────────────────────────────────────────────────
this    decode ───────────────┬─ fetch ─┬ pause · load ┬─ decode ────────
             └ before ────────┘announced               └ its heartbeat says the new version
             └── the other's tokens/s here, and ───────┘ here are compared

The reference is the engine's own load within the pause, as the server reports both.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.child import Child
from benchmarks.support.comparison import say
from benchmarks.support.load import Load
from benchmarks.support.measure import quantile
from benchmarks.support.model import SIZES, make_model
from benchmarks.support.queue_calls import make_ready
from benchmarks.support.rollout_run import Server, engine_args, load_process, redis_host, rollout_servers
from penstock.transfer_queue import Announcement, WeightUpdate
from penstock.weight_sync import WeightPublisher

BEFORE_S = 2.0
SETTLE_S = 1.0
UPDATE_S = 120.0
Weights = dict[str, Any]
"""name → tensor"""


@dataclass(frozen=True)
class SwapPlan:
    """What is measured."""

    engine: str
    settings: dict[str, Any]
    """A recipe's, without the run's name."""
    updates: int
    """Of both servers together, in turn."""
    cores: Sequence[set[int]]
    """Of each server, its engine and its load; empty: all share all."""


@dataclass(frozen=True)
class Swap:
    server: int
    report: WeightUpdate
    before: tuple[float, float]
    """(from, until), of the other server's tokens before."""
    during: tuple[float, float]


class Pair:
    """Two servers with their load and their publishers."""

    def __init__(self, plan: SwapPlan, weights: Sequence[Weights], folder: Path) -> None:
        self.plan, self.weights, self._folder = plan, weights, folder
        self.servers: list[Server] = []
        self._loads: list[Child] = []
        self._publishers: list[WeightPublisher] = []
        self._versions = [0, 0]

    async def start(self, stack: AsyncExitStack, redis: tuple[str, str]) -> None:
        for number in range(2):
            cores = self.plan.cores[number : number + 1]
            settings = {**self.plan.settings, "name": f"weights-{number}"}
            opened = rollout_servers(redis, settings, [f"rollout-{number}"], cores)
            (server,) = await stack.enter_async_context(opened)
            child = await load_process(server, cores[0] if cores else None)
            stack.push_async_callback(child.stop)
            self.servers.append(server)
            self._loads.append(child)
            self._publishers.append(WeightPublisher(self._folder / f"published-{number}", "shm"))

    async def swaps(self, load: Load) -> tuple[list[Swap], list[list[tuple[float, int]]]]:
        """All updates under load, and when each server's tokens came."""
        answers = [asyncio.create_task(self._decode(child, load)) for child in self._loads]
        try:
            await asyncio.sleep(2 * SETTLE_S)
            found = [await self._swap(number % 2) for number in range(self.plan.updates)]
            for child in self._loads:
                await child.tell({"do": "stop"})
            return found, [answer["arrivals"] for answer in await asyncio.gather(*answers)]
        finally:
            for answer in answers:
                answer.cancel()

    async def update(self, number: int) -> tuple[WeightUpdate, tuple[float, float]]:
        """One announcement to one server; (its report, (announced, done))."""
        server = self.servers[number]
        self._versions[number] += 1
        version = self._versions[number]
        weights = self.weights[version % 2]
        manifest = await asyncio.to_thread(self._publishers[number].write, version, weights.items())
        await make_ready(server.queue, version)
        await asyncio.sleep(SETTLE_S + BEFORE_S)
        announced = time.perf_counter()
        await server.queue.publish_version(Announcement(version, manifest.as_dict()))
        report = await _reported(server, version)
        return report, (announced, time.perf_counter())

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    async def _swap(self, number: int) -> Swap:
        report, during = await self.update(number)
        say(f"weights: rollout-{number} v{report.version}: pause {report.pause_s:.3f} s, load {report.load_s:.3f} s")
        return Swap(number, report, (during[0] - BEFORE_S, during[0]), during)

    async def _decode(self, child: Child, load: Load) -> dict[str, Any]:
        return await child.ask({"do": "client", "load": asdict(load), "arrivals": True}, timeout_s=1800)


async def measure_pauses(
    redis: tuple[str, str], plan: SwapPlan, weights: Sequence[Weights], load: Load, folder: Path
) -> dict[str, Any]:
    pair = Pair(plan, weights, folder)
    async with AsyncExitStack() as stack:
        stack.callback(pair.close)
        await pair.start(stack, redis)
        return _figures(*await pair.swaps(load))


def _figures(swaps: Sequence[Swap], arrivals: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    pauses = [swap.report.pause_s for swap in swaps]
    loads = [swap.report.load_s for swap in swaps]
    shares = [swap.report.pause_s / swap.report.load_s for swap in swaps]
    before, during = _others(swaps, arrivals)
    return {
        "updates": len(swaps),
        "pause_s": {"p50": _round(quantile(pauses, 0.5)), "p99": _round(quantile(pauses, 0.99))},
        "pause_over_its_load": {"p50": _round(quantile(shares, 0.5)), "p99": _round(quantile(shares, 0.99))},
        "load_in_pause_s": {"p50": _round(quantile(loads, 0.5)), "p99": _round(quantile(loads, 0.99))},
        "fetch_s": {"p50": _round(median(swap.report.fetch_s for swap in swaps))},
        "in_flight": median(swap.report.in_flight for swap in swaps),
        "others_tokens_per_s": {"before": round(before, 1), "during": round(during, 1)},
    }


def _others(swaps: Sequence[Swap], arrivals: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Tokens per second of the server that does not update, over all windows before, and over all during."""

    def rate(windows: Sequence[tuple[int, tuple[float, float]]]) -> float:
        tokens = sum(count for other, (start, end) in windows for when, count in arrivals[other] if start <= when < end)
        return tokens / sum(end - start for _, (start, end) in windows)

    return (
        rate([(1 - swap.server, swap.before) for swap in swaps]),
        rate([(1 - swap.server, swap.during) for swap in swaps]),
    )


async def _reported(server: Server, version: int) -> WeightUpdate:
    async with asyncio.timeout(UPDATE_S):
        while True:
            for update in await server.queue.updates():
                if update.version == version:
                    return update
            await asyncio.sleep(0.05)


def _round(seconds: float) -> float:
    return round(seconds, 4)


CALLERS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 32, 128
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own, removed at the end


@dataclass(frozen=True)
class SwapExtent:
    """How much is measured, from the environment."""

    engine: str
    model: str
    dtype: str
    swaps: int

    @classmethod
    def read(cls) -> SwapExtent:
        return cls(
            os.environ.get("PENSTOCK_BENCH_ENGINE", "vllm"),
            os.environ.get("PENSTOCK_BENCH_MODEL", "100m"),
            os.environ.get("PENSTOCK_BENCH_DTYPE", "bfloat16"),
            int(os.environ.get("PENSTOCK_BENCH_SWAPS", "40")),
        )

    def setup(self) -> dict[str, Any]:
        cores = cores_of_each()
        pinned = [sorted(one) for one in cores] or "not pinned: fewer than two cores"
        return {**asdict(self), "callers_of_each_server": CALLERS, "cores_of_each_server_and_its_load": pinned}


async def measure_swaps(extent: SwapExtent) -> dict[str, Any]:
    size = SIZES[extent.model]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=SHARED_MEMORY) as folder:
        model = make_model(size, extent.dtype)
        model.save_pretrained(Path(folder) / "model")
        first = {name: tensor.detach() for name, tensor in model.named_parameters()}
        second = {name: tensor * 1.25 for name, tensor in first.items()}
        rollout = {
            "engine": extent.engine,
            "dtype": extent.dtype,
            "max_model_len": 512,
            "max_concurrent": CALLERS,
            "kv_cache_tokens": 1024 + 2 * CALLERS * (PROMPT_TOKENS + ANSWER_TOKENS),
            "request_timeout_s": 600.0,
            **engine_args(extent.engine),
        }
        settings = {"runs_dir": f"{folder}/runs", "model": f"{folder}/model", "rollout": rollout}
        plan = SwapPlan(extent.engine, settings, extent.swaps, cores_of_each())
        load = Load(CALLERS, PROMPT_TOKENS, ANSWER_TOKENS, size.vocab, waves=0)
        async with redis_host() as redis:
            figures = await measure_pauses(redis, plan, [first, second], load, Path(folder))
    return {"weights_mb": round(sum(tensor.nbytes for tensor in first.values()) / 1e6, 1), **figures}


def cores_of_each() -> list[set[int]]:
    """Half of this machine's cores for each server, so that the loading of one takes none of the other's; else none."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(cores) // 2
    return [set(cores[:half]), set(cores[half : 2 * half])] if half else []


def swap_ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Pauses over the engine's own load within each; the other's tokens/s."""
    if not figures:
        return {}
    others = figures["others_tokens_per_s"]
    return {
        "pause_p50_over_engine_load": round(figures["pause_over_its_load"]["p50"], 3),
        "pause_p99_over_engine_load": round(figures["pause_over_its_load"]["p99"], 3),
        "others_tokens_during_update": round(others["during"] / others["before"], 3),
    }
