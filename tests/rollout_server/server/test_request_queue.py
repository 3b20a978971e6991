"""Requests of one server: deadlines, errors, counts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.rollout_server.scripted import Script

from penstock.rollout_server import Chunk, EngineError, GenerateRequest, RolloutMetrics
from penstock.rollout_server.server.registration import QueueConnection
from penstock.rollout_server.server.request_queue import DeadlineExceeded, RequestQueue
from penstock.rollout_server.server.usage import ServerUsage
from penstock.testing import MemoryTransferQueue


def chunk(token: int, finish_reason: Any = None) -> Chunk:
    return Chunk(token_ids=[token], logprobs=[-1.0], version_spans=[(0, 0, 1)], finish_reason=finish_reason)


class ScriptedEngine(Script):
    def generate(self, _request: GenerateRequest) -> AsyncGenerator[Chunk]:
        return self.play()


def make_queue(slots: int = 4, **settings: Any) -> RequestQueue:
    usage = ServerUsage("rollout-0", QueueConnection(MemoryTransferQueue()), lambda: True)
    return RequestQueue(slots, RolloutMetrics(), truncated_sampling=False, usage=usage, **settings)


def request(deadline_s: float | None = None) -> GenerateRequest:
    return GenerateRequest(token_ids=[1], deadline_s=deadline_s)


async def test_deadline_limits_waits_not_the_reader() -> None:
    engine = ScriptedEngine(chunk(5), chunk(6), chunk(7, "length"))
    chunks = make_queue().generate(engine, request(deadline_s=0.3))
    assert (await anext(chunks)).token_ids == [5]
    await asyncio.sleep(0.4)
    assert [token for one in [c async for c in chunks] for token in one.token_ids] == [6, 7]  # they were there
    assert engine.closed


async def test_deadline_closes_a_silent_engine() -> None:
    engine, queue = ScriptedEngine(chunk(5), 3600.0), make_queue()
    chunks = queue.generate(engine, request(deadline_s=0.2))
    assert (await anext(chunks)).token_ids == [5]
    with pytest.raises(DeadlineExceeded):
        await anext(chunks)
    assert engine.closed
    assert (queue.in_flight, queue.in_flight_tokens) == (0, 0)


async def test_deadline_covers_the_wait_for_a_slot() -> None:
    queue = make_queue(slots=1)
    first = queue.generate(ScriptedEngine(chunk(5), 3600.0), request())
    await anext(first)
    second = ScriptedEngine(chunk(6, "stop"))
    with pytest.raises(DeadlineExceeded):
        await anext(queue.generate(second, request(deadline_s=0.1)))
    await first.aclose()
    third = [one async for one in queue.generate(second, request(deadline_s=60))]
    assert [one.token_ids for one in third] == [[6]]


async def test_engine_error_ends_the_answer_and_is_reported() -> None:
    errors: list[None] = []
    queue = make_queue(on_engine_error=lambda: errors.append(None))
    chunks = queue.generate(ScriptedEngine(chunk(5), EngineError("gone")), request())
    assert (await anext(chunks)).token_ids == [5]
    with pytest.raises(EngineError):
        await anext(chunks)
    assert len(errors) == 1
    assert queue.idle.is_set()


async def test_a_stream_never_started_is_uncounted() -> None:
    queue = make_queue()
    chunks = queue.generate(ScriptedEngine(), request())
    assert (queue.in_flight, queue.idle.is_set()) == (1, False)
    del chunks
    gc.collect()
    assert (queue.in_flight, queue.in_flight_tokens, queue.idle.is_set()) == (0, 0, True)
