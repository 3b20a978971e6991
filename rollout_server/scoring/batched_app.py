"""Shared parts of servers around a `Batcher`: its lifespan, `/health`, `/metrics`, the token, the limit of a body."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from starlette.types import ASGIApp

from penstock.common import LimitBody, Metrics, RequireToken, listen
from penstock.common import serve as serve_http
from penstock.common.prometheus import CONTENT_TYPE
from penstock.rollout_server.scoring.batcher import Batcher

logger = logging.getLogger(__name__)


def batched_app(batcher: Batcher[Any, Any], model: str, metrics: Metrics) -> FastAPI:
    """Return an app whose lifespan starts and stops the batcher."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            await batcher.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The model, and how many rows wait; 503 where the scoring task has ended."""
        if not batcher.alive:
            raise HTTPException(503, "the scoring task has ended")
        return {"model": model, "waiting": len(batcher), "batches": batcher.batches}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus text."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return app


def guarded(app: FastAPI, token: str, whose: str) -> ASGIApp:
    """`app` for those that have the token. `whose`: such as "this run". Raises `ValueError` on an empty token."""
    if not token:
        raise ValueError(f"the server needs a token: one of {whose}")
    return RequireToken(LimitBody(app), token, message=f"a bearer token of {whose} is needed")


async def serve_batched(app: ASGIApp, host: str, port: int, name: str) -> None:
    """Serves until it is cancelled or gets SIGTERM. `name` is for the log. Raises `OSError` where the port is taken."""
    # When it stops, requests in progress may take five seconds.
    await serve_http(app, listen(host, port), stop_s=5, on_ready=lambda url: logger.info("%s on %s", name, url))
