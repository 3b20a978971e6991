"""`penstock queue export`: a run's queue for Prometheus, on one route.

poll: queue.status every `every_s` ──► newest ──► GET /metrics, with the run's token

Prometheus sends the token with ``authorization: {credentials: TOKEN}`` of its scrape configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp

from penstock.deploy.link import Link
from penstock.deploy.telemetry.served import metrics_app
from penstock.transfer_queue import QueueError, QueueGauges, ServerInfo, Status, TransferQueue

logger = logging.getLogger(__name__)


class QueueExporter:
    """Keeps the newest status. A queue that is away shows no gauges, so that alerts on absence fire."""

    def __init__(self, queue: TransferQueue, run: str, every_s: float) -> None:
        self._queue = queue
        self._every_s = every_s
        self.newest: Status | None = None
        """None: the queue did not answer."""
        self.servers: list[ServerInfo] = []
        self.registry = CollectorRegistry()
        self.registry.register(QueueGauges(run, lambda: self.newest, lambda: self.servers))

    async def poll(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.newest, self.servers = await self._queue.status(), await self._queue.servers()
            except QueueError as error:
                logger.warning("queue: %s", error)
                self.newest = None
            await asyncio.sleep(self._every_s)


async def serve(link: Link, host: str, port: int, every_s: float) -> None:
    """Until interrupted. Raises `QueueError` where the queue cannot be reached at all."""
    queue = await link.connect()
    try:
        exporter = QueueExporter(queue, link.run, every_s)
        settings = uvicorn.Config(make_app(exporter, link.token), host=host, port=port, log_level="warning")
        await uvicorn.Server(settings).serve()
    finally:
        await queue.close()


def make_app(exporter: QueueExporter, token: str) -> ASGIApp:
    @contextlib.asynccontextmanager
    async def polling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(exporter.poll(), name="poll the queue")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    return metrics_app(exporter.registry, token, polling)
