"""`penstock queue export`: a run's ledger for Prometheus, on one route.

poll: ledger.status every `every_s` ──► newest ──► GET /metrics, with the run's token

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
from penstock.transfer_queue.gauges import LedgerGauges
from penstock.transfer_queue.ledger import Ledger, LedgerError, ServerInfo, Status

logger = logging.getLogger(__name__)


class LedgerExporter:
    """Keeps the newest status. A ledger that is away shows no gauges, so that alerts on absence fire."""

    def __init__(self, ledger: Ledger, run: str, every_s: float) -> None:
        self._ledger = ledger
        self._every_s = every_s
        self.newest: Status | None = None
        """None: the ledger did not answer."""
        self.servers: list[ServerInfo] = []
        self.registry = CollectorRegistry()
        self.registry.register(LedgerGauges(run, lambda: self.newest, lambda: self.servers))

    async def poll(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.newest, self.servers = await self._ledger.status(), await self._ledger.servers()
            except LedgerError as error:
                logger.warning("ledger: %s", error)
                self.newest = None
            await asyncio.sleep(self._every_s)


async def serve(link: Link, host: str, port: int, every_s: float) -> None:
    """Until interrupted. Raises `LedgerError` where the ledger cannot be reached at all."""
    ledger = await link.connect()
    try:
        exporter = LedgerExporter(ledger, link.run, every_s)
        settings = uvicorn.Config(make_app(exporter, link.token), host=host, port=port, log_level="warning")
        await uvicorn.Server(settings).serve()
    finally:
        await ledger.close()


def make_app(exporter: LedgerExporter, token: str) -> ASGIApp:
    @contextlib.asynccontextmanager
    async def polling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(exporter.poll(), name="poll the ledger")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    return metrics_app(exporter.registry, token, polling)
