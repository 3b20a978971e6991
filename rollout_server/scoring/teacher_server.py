"""`penstock teacher-server`: a model that judges given tokens, under the part of OpenAI's API that teachers need.

    POST /v1/completions  {"model", "prompt": [ids], "prompt_logprobs": k, "max_tokens", "temperature"}
                          → {"choices": [{"prompt_logprobs": [null, {"ID": {"logprob": −1.2}, …}, …], "text": ""}]}
                          of each of the prompt's ids, and of the k likeliest in its place
                          nothing is sampled   429 the queue is full   504 not in time   422 bad ids, or too many
    POST /tokenize        {"prompt": "text", "add_special_tokens": false} → {"tokens": [ids], "count"}
    GET  /v1/models       the model and its context length
    GET  /health          {"model", "waiting", "batches"}    503 where the scoring task has ended
    GET  /metrics         Prometheus

Every route needs ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from penstock.common import Metrics
from penstock.rollout_server.scoring.batched_app import batched_app, guarded
from penstock.rollout_server.scoring.batcher import Batcher, Busy, Late
from penstock.rollout_server.scoring.teacher_scorer import JudgedRow, TeacherRow, TokenScorer

MOST_TOP_K = 1024
MOST_LOGPROBS = 2 << 20
"""The most in one answer: some 100 bytes each while it is made. Agent workers ask for no more either."""
TeacherBatcher = Batcher[TeacherRow, JudgedRow]


class CompletionBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = ""
    prompt: list[int] = Field(min_length=1)
    prompt_logprobs: int = Field(
        ge=0,
        le=MOST_TOP_K,
        description="Likeliest tokens in the place of each given one; 0: of the given tokens alone.",
    )
    max_tokens: int = Field(1, ge=0, le=1, description="Nothing is sampled, whatever it says.")
    temperature: float = Field(0.0, ge=0.0, description="Of sampling; logprobs are those at temperature 1.")


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = ""
    prompt: str = Field(max_length=1 << 20)
    add_special_tokens: bool = True


class TeacherMetrics(Metrics):
    """``penstock_teacher_*`` of one server."""

    def __init__(self, batcher: TeacherBatcher) -> None:
        super().__init__("teacher", process=False)
        self.requests = self.counter("requests", "Requests by outcome", ["outcome"])
        self.tokens = self.counter("tokens", "Tokens judged")
        self.gauge("waiting", "Rows that wait").set_function(lambda: len(batcher))


def build_teacher_app(scorer: TokenScorer, token: str, model: str, batcher: TeacherBatcher | None = None) -> ASGIApp:
    """The server as an ASGI app; its lifespan starts and stops the batcher. Raises `ValueError` on an empty token."""
    batches: TeacherBatcher = Batcher(scorer.score) if batcher is None else batcher
    metrics = TeacherMetrics(batches)
    app = batched_app(batches, model, metrics)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Any:
        """Logprobs of the prompt's tokens, and of the likeliest in their places; nothing is sampled."""
        if problem := _problem(body, scorer):
            metrics.requests.labels("refused").inc()
            raise HTTPException(422, problem)
        try:
            # A request waits at most 300 s for its logprobs.
            (row,) = await batches.submit([TeacherRow(body.prompt, body.prompt_logprobs)], 300.0)
        except (Busy, Late) as error:
            metrics.requests.labels(type(error).__name__.lower()).inc()
            busy = isinstance(error, Busy)
            return JSONResponse({"detail": str(error)}, 429 if busy else 504, {"Retry-After": "1"} if busy else None)
        if not row.is_finite:
            raise HTTPException(503, "the model's logprobs are not finite")
        metrics.requests.labels("judged").inc()
        metrics.tokens.inc(len(row.logprobs))
        return await asyncio.to_thread(_answer, model, body.prompt, row)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text: by them a student compares vocabularies."""
        ids = await asyncio.to_thread(scorer.encode, body.prompt, special=body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": scorer.max_tokens}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        entry = {"id": model, "object": "model", "owned_by": "penstock", "max_model_len": scorer.max_tokens}
        return {"object": "list", "data": [entry]}

    return guarded(app, token, "this teacher")


def _answer(model: str, ids: Sequence[int], row: JudgedRow) -> JSONResponse:
    """Rendered in its own thread: a long row with a top k is megabytes."""
    own, tops = row.logprobs.tolist(), zip(row.top_ids.tolist(), row.top_logprobs.tolist(), strict=True)
    judged = [
        {**{str(one): {"logprob": value} for one, value in zip(*top, strict=True)}, str(token): {"logprob": logprob}}
        for token, logprob, top in zip(ids[1:], own, tops, strict=True)
    ]
    choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *judged]}
    return JSONResponse({"object": "text_completion", "model": model, "choices": [choice]})


def _problem(body: CompletionBody, scorer: TokenScorer) -> str:
    ids = body.prompt
    if body.prompt_logprobs > scorer.vocabulary:
        return f"prompt_logprobs: {body.prompt_logprobs}, the vocabulary has {scorer.vocabulary}"
    if len(ids) > scorer.max_tokens:
        return f"prompt: {len(ids)} tokens, the model reads {scorer.max_tokens}"
    if len(ids) * (body.prompt_logprobs + 1) > MOST_LOGPROBS:
        most = MOST_LOGPROBS // len(ids) - 1
        return f"prompt_logprobs: {body.prompt_logprobs}, of {len(ids)} tokens at most {most} in one answer"
    wrong = next((token for token in ids if not 0 <= token < scorer.vocabulary), None)
    return "" if wrong is None else f"prompt: token id {wrong} is outside the vocabulary of {scorer.vocabulary}"
