"""The queue's gauges over HTTP, with the run's token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.deploy.telemetry.metrics import QueueExporter, make_app
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Limits, ServerInfo, Task

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
async def queue() -> MemoryTransferQueue:
    made = MemoryTransferQueue()
    await made.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
    return made


@pytest.fixture
async def client(queue: MemoryTransferQueue) -> AsyncIterator[tuple[httpx.AsyncClient, QueueExporter]]:
    exporter = QueueExporter(queue, "mine", every_s=0.01)
    transport = httpx.ASGITransport(app=make_app(exporter, "secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made, exporter


async def seen(client: httpx.AsyncClient, line: str) -> str:
    async with asyncio.timeout(60):
        while line not in (text := (await client.get("/metrics", headers=TOKEN)).text):
            await asyncio.sleep(0.01)
    return text


async def test_gauges_follow_the_queue(queue: MemoryTransferQueue, client) -> None:
    http, exporter = client
    polling = asyncio.create_task(exporter.poll())
    await seen(http, 'penstock_queue_groups{run="mine",state="queued"} 0.0')
    await queue.submit([Task("train/0", "train", [{"role": "user", "content": "?"}], "test", "1")])
    await seen(http, 'penstock_queue_groups{run="mine",state="queued"} 1.0')
    await queue.heartbeat(ServerInfo("s0", "http://a", 0))
    await seen(http, 'penstock_queue_server_version_lag{run="mine",server="s0"} 0.0')
    await queue.drop_run()
    queue.status = _away  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        while "penstock" in (await http.get("/metrics", headers=TOKEN)).text:
            await asyncio.sleep(0.01)
    polling.cancel()


async def _away():
    from penstock.transfer_queue import QueueUnavailable

    raise QueueUnavailable("status: no answer")


async def test_without_the_token_nothing_is_told(client) -> None:
    http, _ = client
    assert (await http.get("/metrics")).status_code == 401
    assert (await http.get("/nothing", headers={"Authorization": "Bearer wrong"})).status_code == 401
