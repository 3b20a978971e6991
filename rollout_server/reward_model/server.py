"""`penstock reward-server`: a reward model over HTTP.

    POST /score    {"items": [{"messages": [...], "answer": "…"}, …], "timeout_s": 30} → {"scores": […], "cut": […]}
                   429 the queue is full (Retry-After)   504 not scored in time   503 the model gave no number
                   422 the body is wrong, or the model's chat template refuses the messages
    GET  /health   {"model", "waiting", "batches"}    503 where the scoring task has ended
    GET  /metrics  Prometheus

Every route needs ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from penstock.rollout_server.access import LimitBody, RequireToken
from penstock.rollout_server.reward_model.batcher import Batcher, Busy, Late
from penstock.rollout_server.reward_model.classifier import BadConversation, Classifier

MAX_ITEMS = 256
MAX_ANSWER_CHARS = 1 << 20
LAST_REQUESTS_S = 5
"""Requests in progress when the server is told to stop may take this long."""
logger = logging.getLogger(__name__)


class BadScore(Exception):
    """The model gave NaN or an infinity: no score at all."""


STATUSES: Mapping[type[Exception], int] = {Busy: 429, Late: 504, BadScore: 503, BadConversation: 422}


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[dict[str, Any]] = Field(default_factory=list, max_length=1024)
    answer: str = Field(max_length=MAX_ANSWER_CHARS)


class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    items: list[Item] = Field(min_length=1, max_length=MAX_ITEMS)
    timeout_s: float = Field(30.0, gt=0, le=600)


class _Numbers:
    """One registry per server: tests run several in one process."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_reward_requests", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.rows = Counter("penstock_reward_answers", "Answers scored", registry=self.registry)
        self.cut = Counter("penstock_reward_answers_cut", "Answers longer than the context", registry=self.registry)
        self.latency_s = Histogram("penstock_reward_seconds", "From request to scores", registry=self.registry)
        waiting = Gauge("penstock_reward_waiting", "Answers that wait", registry=self.registry)
        waiting.set_function(lambda: len(batcher))


def build_app(classifier: Classifier, token: str, model: str, batcher: Batcher | None = None) -> ASGIApp:
    """The server as an ASGI app; its lifespan starts and ends the batches. Raises `ValueError` on an empty token."""
    if not token:
        raise ValueError("the reward server needs a token")
    batches = Batcher(classifier.score) if batcher is None else batcher
    numbers = _Numbers(batches)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batches.start()
        try:
            yield
        finally:
            await batches.close()

    # without an openapi_url there are no pages about the routes, which would not ask for the token
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    _add_score(app, classifier, batches, numbers)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The model, and how many answers wait; 503 where nothing is scored any more."""
        if not batches.alive:
            raise HTTPException(503, "the scoring task has ended")
        return {"model": model, "waiting": len(batches), "batches": batches.batches}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(numbers.registry), media_type="text/plain; version=0.0.4")

    return RequireToken(LimitBody(app), token)


def _add_score(app: FastAPI, classifier: Classifier, batches: Batcher, numbers: _Numbers) -> None:
    @app.post("/score")
    async def score(body: ScoreRequest) -> Any:
        """Scores of the answers, in order, and which were cut; 429 a full queue, 504 not in time, 503 no number."""
        began = time.monotonic()
        try:
            encoded = await asyncio.to_thread(lambda: [classifier.encode(i.messages, i.answer) for i in body.items])
            scores = _finite(await batches.submit([ids for ids, _ in encoded], body.timeout_s))
        except (Busy, Late, BadScore, BadConversation) as error:
            return _refusal(error, numbers)
        cut = [was_cut for _, was_cut in encoded]
        numbers.requests.labels("scored").inc()
        numbers.rows.inc(len(scores))
        numbers.cut.inc(sum(cut))
        numbers.latency_s.observe(time.monotonic() - began)
        return {"scores": scores, "cut": cut}


def _finite(scores: list[float]) -> list[float]:
    for score in scores:
        if not math.isfinite(score):
            raise BadScore(f"the model's score is {score}")
    return scores


def _refusal(error: Exception, numbers: _Numbers) -> JSONResponse:
    status = STATUSES[type(error)]
    numbers.requests.labels(type(error).__name__.lower()).inc()
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"detail": str(error)}, status, headers=headers)


async def serve(app: ASGIApp, host: str, port: int) -> None:
    """Until cancelled or told by SIGTERM. Raises `OSError` where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    settings = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=LAST_REQUESTS_S)
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("reward server on http://%s:%d/score", host, listener.getsockname()[1])
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
        listener.close()
