"""A role's registry over HTTP, beside whatever else the role does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from penstock.deploy.telemetry.access import metrics_token
from penstock.deploy.telemetry.addresses import Target, announced
from penstock.deploy.telemetry.config import TelemetryConfig
from penstock.rollout_server import METRICS, PROMETHEUS, HttpServer, OpensMetrics, RequireToken, url_host

logger = logging.getLogger(__name__)
PORTS_TRIED = 32
STOP_S = 2


def metrics_app(registry: CollectorRegistry, token: str, lifespan: Lifespan[Starlette] | None = None) -> ASGIApp:
    """``GET /metrics`` for who has the run's token, or the one made from it for metrics alone."""

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=PROMETHEUS)

    app = Starlette(routes=[Route(METRICS, metrics)], lifespan=lifespan)
    return RequireToken(app, token, OpensMetrics(metrics_token(token)))


@contextlib.asynccontextmanager
async def metrics_served(
    config: TelemetryConfig, registry: CollectorRegistry, token: str, folder: Path, who: Target
) -> AsyncIterator[None]:
    """For the length of the block, and listed in `folder`; `who.address` is found here. A role goes on without."""
    listener = _listen(config) if config.metrics else None
    if listener is None:
        yield
        return
    address = f"{url_host(config.host)}:{listener.getsockname()[1]}"
    settings = uvicorn.Config(
        metrics_app(registry, token), log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=STOP_S,
    )  # fmt: skip
    server = HttpServer(settings)
    serving = asyncio.create_task(server.serve([listener]), name="metrics")
    logger.info("metrics of %s at http://%s%s", who.name, address, METRICS)
    try:
        with announced(folder, Target(address, who.run, who.role, who.name)):
            yield
    finally:
        server.should_exit = True
        _, late = await asyncio.wait({serving}, timeout=2 * STOP_S)
        for task in late:
            task.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def _listen(config: TelemetryConfig) -> socket.socket | None:
    """The first free port of those that may be tried; None, and a line in the log, where there is none."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    last: OSError | None = None
    for port in range(config.port, min(config.port + PORTS_TRIED, 65536)) if config.port else (0,):
        try:
            return socket.create_server((config.host, port), family=family)
        except OSError as error:
            last = error
    logger.warning("no metrics: no port on %s from %d on: %s", config.host, config.port, last)
    return None
