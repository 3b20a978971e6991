"""The queue beside raw Redis and beside verl's queue, in one run on one machine; and the queue's index alone.

    penstock bench queue --json

    raw_redis              SET each payload; GET each payload
    ledger                complete each; lease_batch, read, publish_version, commit
    transferqueue          kv_put each; kv_batch_get, kv_clear            (where scripts/setup-bench has been run)
    transferqueue_batched  the same with one kv_batch_put per producer

Each producer stores one payload after the other. Producers and consumer are processes of their own for every store.
The redis-server is configured as `penstock run` configures it: its append-only file is on disk, which TransferQueue
has no counterpart of. Therefore the ratios `…_without_aof` are printed as well.

Environment: PENSTOCK_BENCH_ROUNDS (9; at most 5 for the index), PENSTOCK_BENCH_SIZES (32kb,1mb,8mb),
PENSTOCK_BENCH_PRODUCERS (1,8), PENSTOCK_BENCH_MAX_QUEUED (1000000), PENSTOCK_BENCH_PYTHON (the interpreter that has
TransferQueue; empty: leave it out).
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
import uvloop

from benchmarks.support.arrays import payload_arrays
from benchmarks.support.comparison import Cell, compare, ratio, say
from benchmarks.support.index import measure_index
from benchmarks.support.measure import can_reset, machine, settled
from benchmarks.support.sides import (
    QueuePlan,
    QueueSide,
    StoreSide,
    TransferQueueSide,
    start_transferqueue,
    transferqueue_python,
)
from penstock.transfer_queue import RedisServer

COUNTS = {"32kb": 512, "1mb": 128, "8mb": 32}
"""Payloads per round, all producers together."""
INDEX_ROUNDS = 5
MISSING = "missing: TransferQueue is not installed; scripts/setup-bench makes an environment for it"


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


@dataclass(frozen=True)
class QueueExtent:
    """How much is measured, from the environment."""

    rounds: int
    sizes: list[str]
    producers: list[int]

    @classmethod
    def read(cls) -> QueueExtent:
        sizes = os.environ.get("PENSTOCK_BENCH_SIZES", ",".join(COUNTS)).split(",")
        producers = os.environ.get("PENSTOCK_BENCH_PRODUCERS", "1,8").split(",")
        return cls(int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "9")), sizes, [int(many) for many in producers])


async def _measure() -> dict[str, Any]:
    extent = QueueExtent.read()
    setup = {**asdict(extent), "payloads_per_round": COUNTS, "peaks_are_per_round": can_reset()}
    async with AsyncExitStack() as stack:
        others = await _transferqueue(stack, setup)
        host = await stack.enter_async_context(_redis())
        setup |= await machine(host.client)
        sides = [*_stores(stack, host), *others]
        cells = await _cells(sides, host, extent, extent.sizes)
        figures, ratios = _figures(cells), _ratios(cells)
        await host.client.config_set("appendonly", "no")
        without_aof = await _cells(sides, host, extent, ["1mb"])
        figures["without_aof"] = _figures(without_aof)
        ratios |= {f"{name}_without_aof": value for name, value in _ratios(without_aof).items()}
    figures["index"], index_ratios = await _index(min(extent.rounds, INDEX_ROUNDS))
    return {"bench": "queue", "ratio": ratios | index_ratios, "figures": figures, "setup": setup}


# the stores --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Host:
    """A redis-server and a client to watch and set it by."""

    server: RedisServer
    password: str
    client: aioredis.Redis


@asynccontextmanager
async def _redis() -> AsyncIterator[Host]:
    password = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with (
            RedisServer(Path(folder), password) as server,
            aioredis.Redis.from_url(server.url, password=password) as client,
        ):
            yield Host(server, password, client)


def _stores(stack: AsyncExitStack, host: Host) -> list[QueueSide]:
    kinds = {"raw_redis": "raw", "ledger": "ledger"}
    sides = [StoreSide(name, kind, host.server, host.password) for name, kind in kinds.items()]
    for side in sides:
        stack.push_async_callback(side.stop)
    return [*sides]


async def _transferqueue(stack: AsyncExitStack, setup: dict[str, Any]) -> list[QueueSide]:
    """Both ways to use it, on one driver; none where it is not installed, which `setup` then says."""
    python = transferqueue_python()
    if python is None:
        setup["transferqueue"] = MISSING
        return []
    say("starting TransferQueue")
    driver, versions = await start_transferqueue(python)
    stack.push_async_callback(driver.stop)
    setup["transferqueue"] = versions
    return [
        TransferQueueSide("transferqueue", driver, batched=False),
        TransferQueueSide("transferqueue_batched", driver, batched=True),
    ]


# what they come to -------------------------------------------------------------------------------------------------
Cells = dict[tuple[str, int], dict[str, Cell]]
"""(size, producers) → side → cell"""


async def _cells(sides: Sequence[QueueSide], host: Host, extent: QueueExtent, sizes: Sequence[str]) -> Cells:
    settle = partial(settled, host.client, host.server.directory)
    cells = {}
    for size in sizes:
        payload_bytes = sum(values.nbytes for values in payload_arrays(size).values())
        for producers in extent.producers:
            plan = QueuePlan(size, producers, COUNTS[size])
            cells[size, producers] = await compare(sides, plan, extent.rounds, payload_bytes, settle)
    return cells


def _figures(cells: Cells) -> dict[str, Any]:
    """side → size → ``N producers`` → figures"""
    figures: dict[str, Any] = {}
    for (size, producers), by_side in cells.items():
        for name, cell in by_side.items():
            figures.setdefault(name, {}).setdefault(size, {})[f"{producers}_producers"] = cell.figures()
    return figures


def _ratios(cells: Cells) -> dict[str, float]:
    """``ledger_over_STORE_SIZE`` with one producer, ``…_8_producers`` with more; only of stores that ran."""
    ratios: dict[str, float] = {}
    for (size, producers), by_side in cells.items():
        suffix = "" if producers == 1 else f"_{producers}_producers"
        for name in by_side.keys() - {"ledger"}:
            ratios[f"ledger_over_{name}_{size}{suffix}"] = ratio(by_side, "ledger", name)
    return ratios


async def _index(rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """On a server of its own: what the payloads left behind must not disturb it."""
    async with _redis() as host:
        return await measure_index(host.server.url, host.password, rounds)
