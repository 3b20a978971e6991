"""The requests of one server: admitted or refused, counted, limited in number, ended at their deadlines.

    admit ──► generate: wait for one of `slots` ──► the engine's chunks, merged over `FLUSH_S`

Outlives engines: the counts belong to the server, a request to the engine that it was given to.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from penstock.rollout_server.protocol import (
    Chunk,
    Engine,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Span,
    VersionsDisproved,
    extend_spans,
    fit_request,
    refuse_truncation,
)
from penstock.rollout_server.server.metrics import RolloutMetrics

FLUSH_S = 0.2
"""Longest time that sampled tokens are held back; a killed sidecar loses those, and another server samples them."""
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
        on_engine_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        slots: requests decoded together.
        truncated_sampling: admit top_p below 1 and top_k.
        on_engine_error: called for each answer that fails in the engine.
        """
        self.in_flight = 0
        self.in_flight_tokens = 0
        """Prompts and expected answers."""
        self.answered = 0
        """Answers that were completed."""
        self.turns_away = False
        """Those that wait for a slot end as ``abort``: the engine is about to sleep, or does."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._slots = asyncio.Semaphore(slots)
        self._max_in_flight = slots * (1 + QUEUE_PER_SLOT)
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
        """Streams chunks of about `FLUSH_S`. Raises `EngineError`, `DeadlineExceeded`. Closing it aborts the request.

        Counted from this call on, before the first chunk is read: otherwise a burst would pass `admit`.
        """
        slot = _Slot(self, len(request.token_ids) + request.sampling.max_new_tokens)
        chunks = self._answer(engine, request, slot)
        weakref.finalize(chunks, slot.release)  # a generator that was never started runs no `finally`
        return chunks

    async def _answer(self, engine: Engine, request: GenerateRequest, slot: _Slot) -> AsyncGenerator[Chunk]:
        deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        outcome = "broken"
        try:
            await self._take_slot(deadline)
            try:
                if self.turns_away:
                    outcome = "abort"
                    yield Chunk(finish_reason="abort")
                    return
                async with (
                    aclosing(engine.generate(request)) as chunks,
                    aclosing(_merge(chunks, deadline, whole=request.whole)) as merged,
                ):
                    async for chunk in merged:
                        outcome = chunk.finish_reason or outcome
                        self._count_chunk(chunk, slot)
                        yield chunk
            finally:
                self._slots.release()
        except EngineError:
            self._on_engine_error()
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"the answer was not whole in {request.deadline_s or 0:g} s") from error
        finally:
            slot.release()
            self._metrics.requests.labels(outcome).inc()

    async def _take_slot(self, deadline: float | None) -> None:
        """Raises `TimeoutError`."""
        if not self._slots.locked():
            await self._slots.acquire()  # at once
            return
        async with _until(deadline):
            await self._slots.acquire()

    def _count_chunk(self, chunk: Chunk, slot: _Slot) -> None:
        slot.received(len(chunk.token_ids))
        self.sampled()
        self._metrics.tokens.inc(len(chunk.token_ids))
        self.answered += chunk.finish_reason is not None

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
        self._queue, self._tokens, self._held = queue, tokens, True
        queue.count(1, tokens)

    def received(self, tokens: int) -> None:
        """That many expected tokens have come."""
        self._tokens -= tokens
        self._queue.count(0, -tokens)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._queue.count(-1, -self._tokens)


class _Merged:
    """Tokens of several chunks that travel on as one; a chunk for each token would cost more than the token."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._finish_reason: FinishReason | None = None
        self._routed_experts: list[str] = []
        self._empty = True

    def __bool__(self) -> bool:
        return not self._empty

    def add(self, chunk: Chunk) -> None:
        self._empty = False
        extend_spans(self._spans, chunk.version_spans, len(self._token_ids))
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._routed_experts += chunk.routed_experts
        self._finish_reason = chunk.finish_reason

    def take(self) -> Chunk:
        """One chunk of what was added; empties this."""
        taken = Chunk(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            version_spans=self._spans,
            finish_reason=self._finish_reason,
            routed_experts=self._routed_experts,
        )
        self._token_ids, self._logprobs, self._spans, self._finish_reason = [], [], [], None
        self._routed_experts = []
        self._empty = True
        return taken


async def _merge(chunks: AsyncGenerator[Chunk], deadline: float | None, *, whole: bool) -> AsyncGenerator[Chunk]:
    """Yields the first tokens at once, then those of `FLUSH_S` together: a line of HTTP costs more than a token.

    `whole`: the first tokens wait like the others. Raises `TimeoutError` at the deadline, which holds for each wait;
    the reader's own time is not cut off.
    """
    held, due = _Merged(), time.monotonic() + FLUSH_S if whole else 0.0
    limit = _Deadline(deadline)
    try:
        while (chunk := await limit.wait_for(chunks)) is not None:
            at_once = chunk.finish_reason is not None or time.monotonic() > due
            if held or not at_once:
                held.add(chunk)
            if at_once:
                yield held.take() if held else chunk  # engines that merge themselves need no second chunk
                due = time.monotonic() + FLUSH_S
        if held:
            yield held.take()
    except VersionsDisproved:
        raise
    except EngineError:
        if held:
            yield held.take()
        raise
    finally:
        limit.close()


class _Deadline:
    """Bounds every wait for one answer by one timer; `asyncio.timeout` around each costs more than a token."""

    def __init__(self, at: float | None) -> None:
        """`at`: monotonic; None: never."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._expire)
        self._expired = False
        self._waiting: asyncio.Task[Any] | None = None
        self._cut_off = False

    async def wait_for(self, chunks: AsyncGenerator[Chunk]) -> Chunk | None:
        """The next chunk; None: there is none. Raises `TimeoutError` where it must be waited for past the deadline."""
        task = asyncio.current_task()
        assert task is not None
        before, self._waiting = task.cancelling(), task
        if self._expired:
            self._timer = self._loop.call_soon(self._expire)
        try:
            return await anext(chunks, None)
        except asyncio.CancelledError as error:
            if self._cut_off and task.uncancel() <= before:
                raise TimeoutError from error
            raise
        finally:
            self._waiting = None

    def _expire(self) -> None:
        self._expired = True
        if self._waiting is not None and not self._cut_off:
            self._cut_off = True
            self._waiting.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _until(deadline: float | None) -> asyncio.Timeout:
    return asyncio.timeout(None if deadline is None else deadline - time.monotonic())
