"""`penstock reward-server`: a reward model over HTTP.

    POST /score    {"items": [{"messages": [...], "answer": "…"}, …], "timeout_s": 30} → {"scores": […], "cut": […]}
                   429 the queue is full (Retry-After)   504 not scored in time   503 the model returned no number
                   422 the body is invalid, or the model's chat template rejects the messages
    GET  /health   {"model", "waiting", "batches"}    503 where the scoring task has ended
    GET  /metrics  Prometheus

Every route needs ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from penstock.common import Metrics
from penstock.rollout_server.scoring.batched_app import batched_app, guarded
from penstock.rollout_server.scoring.batcher import Batcher, Busy, Late
from penstock.rollout_server.scoring.classifier import BadConversation, HuggingFaceClassifier

RowBatcher = Batcher[Sequence[int], float]
MAX_ANSWER_CHARS = 1 << 20


class BadScore(Exception):
    """The model returned NaN or an infinity."""


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[dict[str, Any]] = Field(default_factory=list, max_length=1024)
    answer: str = Field(max_length=MAX_ANSWER_CHARS)


class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    items: list[Item] = Field(min_length=1, max_length=256)
    timeout_s: float = Field(30.0, gt=0, le=600)


class RewardMetrics(Metrics):
    """``penstock_reward_*`` of one server."""

    def __init__(self, batcher: RowBatcher) -> None:
        super().__init__("reward", process=False)
        self.requests = self.counter("requests", "Requests by outcome", ["outcome"])
        self.rows = self.counter("answers", "Answers scored")
        self.cut = self.counter("answers_cut", "Answers longer than the context")
        self.latency_s = self.histogram("seconds", "From request to scores")
        self.gauge("waiting", "Answers that wait").set_function(lambda: len(batcher))


def build_reward_app(
    classifier: HuggingFaceClassifier, token: str, model: str, batcher: RowBatcher | None = None
) -> ASGIApp:
    """The server as an ASGI app; its lifespan starts and stops the batcher. Raises `ValueError` on an empty token."""
    batches = Batcher(classifier.score) if batcher is None else batcher
    counters = RewardMetrics(batches)
    app = batched_app(batches, model, counters)

    @app.post("/score")
    async def score(body: ScoreRequest) -> Any:
        """Scores of the answers, in order, and which were cut; 429 queue full, 504 not in time, 503 no number."""
        began = time.monotonic()
        try:
            encoded = await asyncio.to_thread(lambda: [classifier.encode(i.messages, i.answer) for i in body.items])
            scores = await batches.submit([ids for ids, _ in encoded], body.timeout_s)
            if not_finite := [one for one in scores if not math.isfinite(one)]:
                raise BadScore(f"the model's score is {not_finite[0]}")
        except (Busy, Late, BadScore, BadConversation) as error:
            return _refusal(error, counters)
        cut = [was_cut for _, was_cut in encoded]
        counters.requests.labels("scored").inc()
        counters.rows.inc(len(scores))
        counters.cut.inc(sum(cut))
        counters.latency_s.observe(time.monotonic() - began)
        return {"scores": scores, "cut": cut}

    return guarded(app, token, "this run")


def _refusal(error: Exception, counters: RewardMetrics) -> JSONResponse:
    status = {Busy: 429, Late: 504, BadScore: 503, BadConversation: 422}[type(error)]
    counters.requests.labels(type(error).__name__.lower()).inc()
    headers = {"Retry-After": "1"} if status == 429 else None
    return JSONResponse({"detail": str(error)}, status, headers=headers)
