"""The requests of one server: admitted or refused, counted, limited in number, ended at their deadlines.

    admit ──► generate: wait for one of `slots` ──► the engine's chunks

Outlives engines: the counts belong to the server, a request to the engine that it was given to.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from penstock.rollout_server.protocol import (
    Chunk,
    Engine,
    EngineError,
    EngineInfo,
    GenerateRequest,
    fit_request,
    refuse_truncation,
)
from penstock.rollout_server.server.metrics import RolloutMetrics
from penstock.rollout_server.server.usage import ServerUsage

QUEUE_PER_SLOT = 4
"""Requests that may wait per request that is decoded; further ones are refused, for another server."""


class NotServing(Exception):
    """This server cannot answer now; another one, or this one later, may. The message holds the cause."""


class TooOld(Exception):
    """This server's weights are older than the request's `min_version`."""


class QueueFull(Exception):
    """Too many requests wait here; another server answers sooner."""


class DeadlineExceeded(Exception):
    """The request's `deadline_s` has passed; the engine has stopped working on it."""


class RequestQueue:
    """`admit`, then `generate`, for each request."""

    def __init__(
        self,
        slots: int,
        metrics: RolloutMetrics,
        *,
        truncated_sampling: bool,
        usage: ServerUsage,
        on_engine_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        slots: requests decoded together.
        truncated_sampling: admit top_p below 1 and top_k.
        usage: counts what the requests use.
        on_engine_error: called for each answer that fails in the engine.
        """
        self.in_flight = 0
        self.in_flight_tokens = 0
        """Prompts and expected answers."""
        self.answered = 0
        """Answers that were completed."""
        self.is_rejecting = False
        """True while the engine sleeps or is about to: queued requests end as ``abort``."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._slots = asyncio.Semaphore(slots)
        self._max_in_flight = slots * (1 + QUEUE_PER_SLOT)
        self._usage = usage
        self._metrics, self._truncated_sampling, self._on_engine_error = metrics, truncated_sampling, on_engine_error
        self._sampled_at = self._busy_since = time.monotonic()

    def sampled(self) -> None:
        """Records that a token was sampled now."""
        self._sampled_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last token; with requests in flight, since the first of them at most."""
        return time.monotonic() - (max(self._sampled_at, self._busy_since) if self.in_flight else self._sampled_at)

    def admit(self, request: GenerateRequest, info: EngineInfo, version: int) -> GenerateRequest:
        """The request as the engine will get it. Raises `TooOld`, `QueueFull`, `BadRequest`."""
        if not self._truncated_sampling:
            refuse_truncation(request.sampling)
        fitting = fit_request(request, info)
        if version < request.min_version:
            raise TooOld(f"this server holds version {version}, the request needs {request.min_version}")
        if self.in_flight >= self._max_in_flight:
            raise QueueFull(f"{self.in_flight} requests are in flight here already")
        return fitting

    def generate(self, engine: Engine, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Streams the engine's chunks. Raises `EngineError`, `DeadlineExceeded`. Closing it aborts the request.

        Counted from this call on, before the first chunk is read: otherwise a burst would pass `admit`.
        """
        slot = _Slot(self, len(request.token_ids) + request.sampling.max_new_tokens)
        chunks = self._answer(engine, request, slot)
        weakref.finalize(chunks, slot.release)  # a generator that was never started runs no `finally`
        return chunks

    async def _answer(self, engine: Engine, request: GenerateRequest, slot: _Slot) -> AsyncGenerator[Chunk]:
        """The deadline holds for each wait; the time a reader takes between two chunks is not cut off."""
        deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        outcome = "broken"
        try:
            async with _until(deadline):
                await self._slots.acquire()
            self._usage.begin(request.episode_id)
            try:
                if self.is_rejecting:
                    outcome = "abort"
                    yield Chunk(finish_reason="abort")
                    return
                async with aclosing(engine.generate(request)) as chunks:
                    while True:
                        async with _until(deadline):
                            chunk = await anext(chunks, None)
                        if chunk is None:
                            return
                        outcome = chunk.finish_reason or outcome
                        self.answered += chunk.finish_reason is not None
                        self.sampled()
                        self._metrics.tokens.inc(len(chunk.token_ids))
                        self._usage.sampled(request.episode_id, len(chunk.token_ids))
                        slot.received(len(chunk.token_ids))
                        yield chunk
            finally:
                self._usage.end(request.episode_id)
                self._slots.release()
        except EngineError:
            self._on_engine_error()
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"the answer was not whole in {request.deadline_s or 0:g} s") from error
        finally:
            slot.release()
            self._metrics.requests.labels(outcome).inc()

    def count(self, requests: int, tokens: int) -> None:
        """Changes the numbers in flight."""
        self.in_flight_tokens += tokens
        if requests == 0:
            return
        if self.in_flight == 0:
            self._busy_since = time.monotonic()
        self.in_flight += requests
        self._metrics.in_flight.set(self.in_flight)
        (self.idle.clear if self.in_flight else self.idle.set)()


class _Slot:
    """One request's part in the counts, released once."""

    def __init__(self, queue: RequestQueue, tokens: int) -> None:
        self._queue, self._tokens, self._holds_slot = queue, tokens, True
        queue.count(1, tokens)

    def received(self, tokens: int) -> None:
        """Takes received tokens off the expected ones."""
        self._tokens -= tokens
        self._queue.count(0, -tokens)

    def release(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self._queue.count(-1, -self._tokens)


def _until(deadline: float | None) -> asyncio.Timeout:
    return asyncio.timeout(None if deadline is None else deadline - time.monotonic())
