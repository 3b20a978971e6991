"""The stores that are compared, each with its own processes: producers, one consumer, and the store itself.

A round: every producer stores its share, all at once; then the consumer takes everything out. Phases do not overlap, so
that no store gains by the order in which the machine runs its processes.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.support.child import ROOT, Child
from benchmarks.support.measure import family
from penstock.transfer_queue import RedisServer

PYTHON_VARIABLE = "PENSTOCK_BENCH_PYTHON"
SUPPORT = Path(__file__).resolve().parent
CONSUME_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class QueuePlan:
    """What one round moves."""

    size: str
    """A key of `arrays.SIZES`."""
    producers: int
    count: int
    """Payloads, all producers together."""


@dataclass(frozen=True)
class Round:
    produce_s: float
    """From the first producer's start to the last one's end."""
    consume_s: float
    put_s: Sequence[float]
    """Latency of each payload's storing, as its producer saw it."""

    @property
    def total_s(self) -> float:
        return self.produce_s + self.consume_s


class QueueSide(Protocol):
    name: str

    async def round(self, plan: QueuePlan) -> Round: ...

    def pids(self) -> list[int]:
        """Every process that has a part in it."""

    async def stop(self) -> None: ...


class StoreSide:
    """Raw Redis or the queue, on a server that the caller owns. Made by `start`."""

    def __init__(self, name: str, kind: str, server: RedisServer, password: str) -> None:
        self.name = name
        self._command = ("benchmarks.support.store_child", kind, server.url)
        self._env = {"PENSTOCK_BENCH_PASSWORD": password}
        self._server = server
        self._consumer: Child | None = None
        self._producers: list[Child] = []

    async def round(self, plan: QueuePlan) -> Round:
        consumer = await self._staff(plan.producers)
        share, run = plan.count // plan.producers, f"bench-{secrets.token_hex(4)}"
        ready = {"do": "get_ready", "run": run, "size": plan.size, "count": share}
        active = list(enumerate(self._producers[: plan.producers]))
        await consumer.ask({"do": "start_round", "run": run, "size": plan.size, "count": plan.count})
        await asyncio.gather(*(producer.ask({**ready, "worker": number}) for number, producer in active))
        produced = await asyncio.gather(*(producer.ask({"do": "produce"}) for _, producer in active))
        payloads = {"size": plan.size, "workers": plan.producers, "count": plan.count}
        took = await consumer.ask({"do": "consume", **payloads}, CONSUME_TIMEOUT_S)
        await consumer.ask({"do": "end_round"})
        return _round(produced, took["consume_s"])

    def pids(self) -> list[int]:
        children = [child for child in [self._consumer, *self._producers] if child is not None]
        server = [] if self._server.pid is None else [self._server.pid]
        return [*server, *(pid for child in children for pid in family(child.pid))]

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in [self._consumer, *self._producers] if child is not None))

    async def _staff(self, producers: int) -> Child:
        """Start what is missing; returns the consumer."""
        while len(self._producers) < producers:
            self._producers.append(await Child.module(*self._command, env=self._env))
        if self._consumer is None:
            self._consumer = await Child.module(*self._command, env=self._env)
        return self._consumer


class TransferQueueSide:
    """verl's queue in its own environment. `batched`: each producer puts all its payloads by one call."""

    def __init__(self, name: str, driver: Child, *, batched: bool) -> None:
        self.name = name
        self._driver = driver
        self._batched = batched

    async def round(self, plan: QueuePlan) -> Round:
        question = {"do": "round", "size": plan.size, "producers": plan.producers, "count": plan.count}
        answer = await self._driver.ask({**question, "batched": self._batched}, CONSUME_TIMEOUT_S)
        return _round(answer["produced"], answer["consume_s"])

    def pids(self) -> list[int]:
        return family(self._driver.pid)

    async def stop(self) -> None:
        await self._driver.stop()


def transferqueue_python() -> str | None:
    """The interpreter that has TransferQueue: named by a variable (empty: none), made by scripts/setup-bench, this."""
    if (named := os.environ.get(PYTHON_VARIABLE)) is not None:
        return named or None
    own = ROOT / ".venv-bench" / "bin" / "python"
    if own.exists():
        return str(own)
    try:
        importlib.metadata.version("TransferQueue")
    except importlib.metadata.PackageNotFoundError:
        return None
    return sys.executable


async def start_transferqueue(python: str) -> tuple[Child, dict[str, Any]]:
    """Its driver, and the versions that it runs. The queue's sockets are on loopback; ray's own ask for a token."""
    env = {
        "PYTHONPATH": str(SUPPORT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TQ_LOGGING_LEVEL": "WARNING",
    }
    # Neither path nor working directory may be the repository: its folder transfer_queue has the package's name.
    driver = await Child.start(python, str(SUPPORT / "transferqueue_child.py"), env=env, cwd=SUPPORT)
    try:
        return driver, await driver.ask({"do": "versions"}, timeout_s=180.0)
    except BaseException:
        await driver.stop()
        raise


def _round(produced: Sequence[dict[str, Any]], consume_s: float) -> Round:
    produce_s = max(one["ended"] for one in produced) - min(one["began"] for one in produced)
    return Round(produce_s, consume_s, [latency for one in produced for latency in one["each_s"]])
