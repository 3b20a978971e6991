"""An answer over HTTP: the status waits for the first chunk, silence is filled, a client that goes is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from penstock.rollout_server import BadRequest, Chunk, DeadlineExceeded, EngineError, GenerateResponse, routes

ONE = Chunk(token_ids=[1], logprobs=[-0.5], version_spans=[(0, 0, 1)])
LAST = Chunk(token_ids=[2], logprobs=[-0.25], version_spans=[(0, 0, 1)], finish_reason="stop")


class Exchange:
    """One HTTP exchange as ASGI sees it."""

    def __init__(self, *items: Chunk | Exception | float) -> None:
        self.items, self.sent = items, []
        self.closed, self.gone = False, asyncio.Event()

    async def chunks(self) -> AsyncGenerator[Chunk]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Chunk):
                    yield item
                else:
                    await asyncio.sleep(item)
        finally:
            self.closed = True

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self) -> tuple[int, list[bytes]]:
        """(status, non-empty bodies)."""
        await GenerateResponse(self.chunks())({"type": "http"}, self.receive, self.send)
        assert self.closed
        assert self.gone.is_set() or not self.sent[-1].get("more_body", False)
        status = self.sent[0]["status"] if self.sent else 0
        return status, [message["body"] for message in self.sent[1:] if message["body"]]


async def test_chunks_are_lines_and_the_last_ends_the_response() -> None:
    status, lines = await Exchange(ONE, LAST, RuntimeError("never read")).run()
    assert status == 200
    assert [json.loads(line)["token_ids"] for line in lines] == [[1], [2]]
    assert json.loads(lines[1])["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [(EngineError("gone"), 502, ""), (DeadlineExceeded("late"), 504, "deadline_s"), (BadRequest("x", "y"), 422, "x")],
)
async def test_what_goes_wrong_first_is_the_status_and_later_the_last_line(
    error: Exception, status: int, field: str
) -> None:
    given, bodies = await Exchange(error).run()
    assert (given, json.loads(bodies[0])["error"]["field"]) == (status, field)
    given, bodies = await Exchange(ONE, error).run()
    assert given == 200
    assert json.loads(bodies[-1])["error"]["message"] == str(error)


async def test_silence_is_filled_with_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "KEEPALIVE_S", 0.02)
    status, lines = await Exchange(0.2, ONE, LAST).run()
    assert status == 200
    assert lines[0] == b"\n"
    assert [json.loads(line)["token_ids"] for line in lines if line.strip()] == [[1], [2]]


async def test_a_client_that_goes_closes_the_answer() -> None:
    exchange = Exchange(ONE, 3600.0)
    running = asyncio.create_task(exchange.run())
    while len(exchange.sent) < 2:
        await asyncio.sleep(0.01)
    assert not exchange.closed
    exchange.gone.set()
    async with asyncio.timeout(60):
        await running
