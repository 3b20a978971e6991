"""The API process: keys, limits and routes around the log of requests. It loads neither torch nor a model."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from penstock.common import HttpServer, add_error_handlers, error_response, listen
from penstock.service.bodies import BoundBodies
from penstock.service.keys import RequireKey
from penstock.service.metrics import CountRefusals
from penstock.service.record_routes import make_record_router
from penstock.service.routes import RETRY_S, ServiceContext, make_router
from penstock.transfer_queue import QueueUnavailable


def make_app(context: ServiceContext, owners: Mapping[str, str]) -> ASGIApp:
    """`owners`: digest of a key → whose it is."""
    app = FastAPI(title="Penstock training service", docs_url=None, redoc_url=None)

    def busy(error: QueueUnavailable) -> Response:
        """429, since the SDK asks again after a pause; a 503 it repeats at once, without end."""
        context.metrics.refusals.labels("redis").inc()
        return error_response(429, "", f"Redis is away: {error}", retry_after_s=RETRY_S)

    add_error_handlers(app, {QueueUnavailable: busy})
    app.include_router(make_router(context))
    app.include_router(make_record_router(context))
    # A token of a prompt takes at most 16 bytes of JSON; what is left is for metadata.
    json_bytes = (1 << 20) + 16 * context.context_length
    bounded = BoundBodies(app, json_bytes, context.metrics, RETRY_S)
    return CountRefusals(RequireKey(bounded, owners), context.metrics)


async def serve_api(context: ServiceContext, owners: Mapping[str, str], host: str, port: int) -> None:
    """Serves until it is cancelled."""
    async with HttpServer(make_app(context, owners), listen(host, port)):
        await context.futures.run()
