"""An answer over HTTP: the status waits for the first chunk, silence is filled, a client that goes is noticed.

Who is let in: every route of the schema and every path that is none, with no token and with wrong ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.rollout_server.conftest import HEADERS, TOKEN, RunningServer, StubQueue, rollout_server
from tests.rollout_server.scripted import Script

from penstock.rollout_server import BadRequest, Chunk, EngineError
from penstock.rollout_server.server.answers import GenerateResponse
from penstock.rollout_server.server.request_queue import DeadlineExceeded

MAX_BODY_BYTES = 64 << 20
ONE = Chunk(token_ids=[1], logprobs=[-0.5], version_spans=[(0, 0, 1)])
LAST = Chunk(token_ids=[2], logprobs=[-0.25], version_spans=[(0, 0, 1)], finish_reason="stop")


class Exchange(Script):
    """One HTTP exchange as ASGI sees it."""

    def __init__(self, *items: Chunk | Exception | float) -> None:
        super().__init__(*items)
        self.sent, self.gone = [], asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self) -> tuple[int, list[bytes]]:
        """(status, non-empty bodies)."""
        await GenerateResponse(self.play())({"type": "http"}, self.receive, self.send)
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
    monkeypatch.setattr("penstock.rollout_server.server.answers.KEEPALIVE_S", 0.02)
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


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(StubQueue(), tmp_path) as running:
        yield running


async def test_client_that_goes_before_its_body_is_whole_is_no_failure_of_the_server(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    _, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
    await writer.drain()
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as http:
        await http.get(f"{server.url}/health")  # the server has read what was sent before
        writer.close()
        await writer.wait_closed()
        body, headers = b'{"token_ids": [1]}', {"Content-Type": "Application/JSON; charset=utf-8"}
        for _ in range(3):
            assert (await http.post(f"{server.url}/generate", content=body, headers=headers)).status_code == 200
    assert "ClientDisconnect" not in caplog.text


WRONG = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"})


async def test_every_route_refuses_a_missing_and_a_wrong_token(server: RunningServer) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        paths = (await http.get(f"{server.url}/openapi.json", headers=HEADERS)).json()["paths"]
        asked = [(method, path) for path, operations in paths.items() for method in operations]
        assert {("post", "/generate"), ("post", "/weights"), ("post", "/drain"), ("get", "/v1/models")} <= set(asked)
        for method, path in [*asked, ("get", "/openapi.json"), ("get", "/nothing"), ("delete", "/health")]:
            for headers in WRONG:
                encoded = {key: value.encode("latin-1") for key, value in headers.items()}
                url = server.url + path.replace("{", "").replace("}", "")
                response = await http.request(method, url, headers=encoded, json={"token_ids": [1]})
                assert response.status_code == 401, (method, path)
                assert response.json()["error"]["field"] == "authorization"
                assert response.headers["www-authenticate"] == "Bearer"
    assert not server.task.done()


async def test_the_token_for_metrics_opens_them_alone(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer for metrics"}
    async with (
        rollout_server(StubQueue(), tmp_path, metrics_token="for metrics") as running,
        httpx.AsyncClient(timeout=60, headers=headers) as http,
    ):
        found = await http.get(f"{running.url}/metrics")
        assert (found.status_code, "penstock_rollout_in_flight" in found.text) == (200, True)
        for method, path in (("get", "/health"), ("post", "/generate"), ("post", "/drain"), ("get", "/metrics/")):
            assert (await http.request(method, running.url + path, json={})).status_code == 401, path


async def test_an_unsound_request_is_explained_by_the_schema(server: RunningServer) -> None:
    sound = {"token_ids": [1], "sampling": {"max_new_tokens": 1}}
    json_type = {"Content-Type": "application/json"}
    long = json.dumps({**sound, "request_id": "x" * (MAX_BODY_BYTES + 1)})
    cases: list[tuple[dict[str, str], str, int, str]] = [
        (json_type, json.dumps(sound), 200, ""),
        ({"Content-Type": "application/json; charset=utf-8"}, json.dumps(sound), 200, ""),
        (json_type, json.dumps({**sound, "token_ids": [1.5]}), 422, "token_ids.0"),
        (json_type, json.dumps({**sound, "token_ids": [True]}), 422, "token_ids.0"),
        (json_type, json.dumps({**sound, "unknown": 1}), 422, "unknown"),
        (json_type, '{"token_ids": [1], "deadline_s": NaN}', 422, "deadline_s"),
        (json_type, json.dumps({**sound, "token_ids": [1 << 20]}), 422, "token_ids.0"),
        (json_type, json.dumps({**sound, "min_version": 99}), 409, "min_version"),
        (json_type, '{"token_ids": [1]', 422, ""),
        ({"Content-Type": "text/plain"}, json.dumps(sound), 422, ""),
        (json_type, long, 413, ""),
    ]
    async with httpx.AsyncClient(timeout=60, headers=HEADERS) as http:
        for headers, body, status, field in cases:
            response = await http.post(f"{server.url}/generate", headers=headers, content=body)
            assert response.status_code == status, body[:80]
            if status != 200:
                assert response.json()["error"]["field"] == field, body[:80]

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 2):
                yield b" " * (1 << 20)

        response = await http.post(f"{server.url}/generate", headers=json_type, content=endless())
        assert response.status_code == 413


async def test_a_cancelled_response_closes_the_answer_and_is_cancelled() -> None:
    exchange = Exchange(ONE, 3600.0)
    running = asyncio.create_task(exchange.run())
    while len(exchange.sent) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert exchange.closed
