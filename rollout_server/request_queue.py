"""The requests that one server is answering: let in or refused, counted, cut off at their deadlines.

    admit ──► generate: wait for one of `slots` ──► the engine's chunks, about `FLUSH_S` long each

Outlives engines: a request belongs to the engine that it was given to, the counts to the server.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from penstock.rollout_server.client import until
from penstock.rollout_server.metrics import Metrics
from penstock.rollout_server.protocol import (
    Chunk,
    Engine,
    EngineError,
    EngineInfo,
    GenerateRequest,
    fit_request,
    join_chunks,
    refuse_truncation,
)

FLUSH_S = 0.2
"""Tokens of one answer are held back this long at most; what a killed sidecar held is sampled again elsewhere."""
QUEUE_PER_SLOT = 4
"""Requests that may wait per request that is decoded; more are sent elsewhere."""


class NotServing(Exception):
    """No answer here now; another server, or this one later, may. The message says why."""


class TooOld(Exception):
    """The weights here are older than the request asks for."""


class QueueFull(Exception):
    """More requests wait here than should; another server answers sooner."""


class DeadlineOver(Exception):
    """The request's `deadline_s` ran out; the engine does not work on it any more."""


class Serving:
    """`admit`, then `generate`, for each request."""

    def __init__(self, slots: int, metrics: Metrics, *, truncated_sampling: bool) -> None:
        self.in_flight = 0
        self.in_flight_tokens = 0
        """Prompts, and what is still expected of the answers."""
        self.answered = 0
        """Answers that came to their end."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._slots = asyncio.Semaphore(slots)
        self._most_in_flight = slots * (1 + QUEUE_PER_SLOT)
        self._metrics, self._truncated_sampling = metrics, truncated_sampling
        self._sampled_at = self._busy_since = time.monotonic()

    def sampled(self) -> None:
        """A token was sampled now."""
        self._sampled_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Since the last token or, where there is work, since it is there, whichever is shorter."""
        return time.monotonic() - (max(self._sampled_at, self._busy_since) if self.in_flight else self._sampled_at)

    def admit(self, request: GenerateRequest, info: EngineInfo, version: int) -> GenerateRequest:
        """The request as the engine will get it. Raises `TooOld`, `QueueFull`, `BadRequest`."""
        if not self._truncated_sampling:
            refuse_truncation(request.sampling)
        fitting = fit_request(request, info)
        if version < request.min_version:
            raise TooOld(f"this server holds version {version}, the request asks for {request.min_version}")
        if self.in_flight >= self._most_in_flight:
            raise QueueFull(f"{self.in_flight} requests are here already; more would wait for long")
        return fitting

    def generate(self, engine: Engine, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`; raises `DeadlineOver` too. Counted from this call on: no burst slips past `admit`."""
        ticket = _Ticket(self, len(request.token_ids) + request.sampling.max_new_tokens)
        chunks = self._within_deadline(self._answer(engine, request, ticket), request.deadline_s)
        weakref.finalize(chunks, ticket.give_back)  # one that nobody ever began to read
        return chunks

    async def _within_deadline(self, chunks: AsyncGenerator[Chunk], deadline_s: float | None) -> AsyncGenerator[Chunk]:
        if deadline_s is not None:
            chunks = until(time.monotonic() + deadline_s, chunks)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except TimeoutError as error:
            raise DeadlineOver(f"the answer was not whole in {deadline_s:g} s") from error

    async def _answer(self, engine: Engine, request: GenerateRequest, ticket: _Ticket) -> AsyncGenerator[Chunk]:
        outcome = "broken"
        try:
            async with self._slots, aclosing(engine.generate(request)) as chunks:
                async for chunk in _coalesce(chunks):
                    ticket.took(len(chunk.token_ids))
                    self.sampled()
                    self._metrics.tokens.inc(len(chunk.token_ids))
                    self.answered += chunk.finish_reason is not None
                    outcome = chunk.finish_reason or outcome
                    yield chunk
        finally:
            ticket.give_back()
            self._metrics.requests.labels(outcome).inc()

    def count(self, requests: int, tokens: int) -> None:
        """So many more requests and tokens in flight."""
        if self.in_flight == 0:
            self._busy_since = time.monotonic()
        self.in_flight += requests
        self.in_flight_tokens += tokens
        self._metrics.in_flight.set(self.in_flight)
        (self.idle.clear if self.in_flight else self.idle.set)()


class _Ticket:
    """One request's part in the counts, given back once."""

    def __init__(self, serving: Serving, tokens: int) -> None:
        self._serving, self._tokens, self._held = serving, tokens, True
        serving.count(1, tokens)

    def took(self, tokens: int) -> None:
        self._tokens -= tokens
        self._serving.count(0, -tokens)

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._serving.count(-1, -self._tokens)


async def _coalesce(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """The first tokens at once, then together what came within `FLUSH_S`: a line of HTTP costs more than a token."""
    held: Chunk | None = None
    flushed = 0.0
    try:
        async for chunk in chunks:
            held = join_chunks(held, chunk) if held else chunk
            if chunk.finish_reason or time.monotonic() - flushed > FLUSH_S:
                yield held
                held, flushed = None, time.monotonic()
    except EngineError:
        if held:
            yield held
        raise
    if held:
        yield held
