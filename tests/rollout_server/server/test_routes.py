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
from tests.rollout_server.conftest import HEADERS, TOKEN, RunningServer, RunQueue, rollout_server
from tests.rollout_server.scripted import Script
from tests.until import until

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
    await until(lambda: len(exchange.sent) == 2)
    assert not exchange.closed
    exchange.gone.set()
    async with asyncio.timeout(60):
        await running


@pytest.mark.parametrize("gone", [False, True])
async def test_cancelled_response_closes_the_answer_and_is_cancelled(gone: bool) -> None:
    """Also if its client goes at the same moment."""
    exchange = Exchange(ONE, 3600.0)
    running = asyncio.create_task(exchange.run())
    await until(lambda: len(exchange.sent) == 2)
    if gone:
        exchange.gone.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert exchange.closed


@pytest.fixture
async def server(queue: RunQueue, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(queue, tmp_path) as running:
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


async def test_token_for_metrics_opens_them_alone(queue: RunQueue, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer for metrics"}
    async with (
        rollout_server(queue, tmp_path, metrics_token="for metrics") as running,
        httpx.AsyncClient(timeout=60, headers=headers) as http,
    ):
        found = await http.get(f"{running.url}/metrics")
        assert (found.status_code, "penstock_rollout_in_flight" in found.text) == (200, True)
        for method, path in (("get", "/health"), ("post", "/generate"), ("post", "/drain"), ("get", "/metrics/")):
            assert (await http.request(method, running.url + path, json={})).status_code == 401, path


def sampling(**changes: Any) -> bytes:
    return json.dumps({"token_ids": [1], "sampling": {"max_new_tokens": 1, **changes}}).encode()


JSON, SOUND = "application/json", sampling()
BODIES: list[tuple[bytes | dict[str, Any] | list[Any], int, str]] = [
    (SOUND, 200, ""),
    ({}, 422, "token_ids"),
    ([], 422, ""),
    *(({"token_ids": ids}, 422, field) for ids, field in [([], "token_ids"), ([1] * 600, "token_ids")]),
    *(({"token_ids": [one]}, 422, "token_ids.0") for one in (-1, "a", "1", 10**30, 1 << 20, 1.5, True)),
    ({"token_ids": [1, 512]}, 422, "token_ids.1"),
    ({"token_ids": [1], "prompt": "x"}, 422, "prompt"),
    ({"token_ids": [1], "deadline_s": 0}, 422, "deadline_s"),
    (b'{"token_ids": [1], "deadline_s": NaN}', 422, "deadline_s"),
    (sampling(max_tokens=4), 422, "sampling.max_tokens"),
    (sampling(temperature=-1), 422, "sampling.temperature"),
    (sampling(temperature=float("nan")), 422, "sampling.temperature"),
    (b'{"token_ids": [1], "sampling": {"temperature": 1e999}}', 422, "sampling.temperature"),
    (sampling(seed=10**30), 422, "sampling.seed"),
    (sampling(max_new_tokens=10**30), 422, "sampling.max_new_tokens"),
    (sampling(top_p=0.9), 422, "sampling.top_p"),
    (sampling(top_k=5), 422, "sampling.top_k"),
    ({"token_ids": [1], "min_version": 99}, 409, "min_version"),
    (b'{"token_ids": [1]', 422, ""),
    (b"{", 422, ""),
    (b"", 422, ""),
    (b"[" * 200_000, 422, ""),
    (b"\xff\xfe", 422, ""),
    (b'{"token_ids": [' + b"9" * 5000 + b"]}", 422, ""),
    (b'{"token_ids": [1], "request_id": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, ""),
]
TYPES = [(f"{JSON}; charset=utf-8", 200), ("text/plain", 422), ("application/x-www-form-urlencoded", 422)]


async def test_unsound_request_is_refused_by_field(server: RunningServer) -> None:
    cases = [(JSON, *case) for case in BODIES] + [(kind, SOUND, status, "") for kind, status in TYPES]
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=HEADERS) as http:
        for kind, body, status, field in cases:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await http.post("/generate", headers={"Content-Type": kind}, content=content)
            assert response.status_code == status, content[:80]
            if status != 200:
                assert response.json()["error"]["field"] == field, content[:80]
                assert response.json()["error"]["message"]

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 2):
                yield b" " * (1 << 20)

        response = await http.post("/generate", headers={"Content-Type": JSON}, content=endless())
        assert response.status_code == 413
        for wrong in ({"action": "push"}, {}, {"action": "pull", "version": 2}):
            assert (await http.post("/weights", json=wrong)).status_code == 422
        for method, path, status in (("GET", "/nothing", 404), ("GET", "/generate", 405), ("DELETE", "/weights", 405)):
            response = await http.request(method, path)
            assert (response.status_code, f"{method} {path}" in response.json()["error"]["message"]) == (status, True)
