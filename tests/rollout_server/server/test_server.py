"""A sidecar over HTTP, with fake engines: routes, tokens, refusals, weights pulled, engine restarts, the end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.rollout_server.conftest import (
    TOKEN,
    RunningServer,
    StubQueue,
    check_answer,
    fake_answer,
    rollout_server,
    small_config,
)

from penstock.rollout_server import Engine, EngineError, EngineInfo, RolloutConfig, ServerJob, Sidecar, serve
from penstock.testing import FakeEngine
from penstock.transfer_queue import RunContext

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def queue() -> StubQueue:
    return StubQueue()


@pytest.fixture
async def server(queue: StubQueue, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(queue, tmp_path, token_s=0.002) as running:
        yield running


async def post(server: RunningServer, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{server.url}/generate", json=body, headers=HEADERS if headers is None else headers)


async def get(server: RunningServer, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.get(server.url + path, headers=HEADERS)


def answer_of(response: httpx.Response) -> tuple[list[int], list[Any], str]:
    chunks = [json.loads(line) for line in response.text.splitlines() if line]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    logprobs = [value for chunk in chunks for value in chunk["logprobs"]]
    spans = []
    for chunk in chunks:
        check_answer(chunk["token_ids"], chunk["logprobs"], chunk["version_spans"])
        spans += chunk["version_spans"]
    assert len(ids) == len(logprobs)
    return ids, spans, chunks[-1]["finish_reason"]


async def test_ids_in_ids_out(server: RunningServer) -> None:
    response = await post(server, {"token_ids": [1, 2, 3], "sampling": {"max_new_tokens": 50}})
    assert response.headers["content-type"] == "application/x-ndjson"
    ids, spans, reason = answer_of(response)
    assert ids == fake_answer([1, 2, 3], 50)
    assert {span[0] for span in spans} == {0}
    assert reason == "length"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 512]}, "token_ids.1"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"token_ids": ["a"]}, "token_ids.0"),
        ({"token_ids": [1] * 600}, "token_ids"),
        ({"token_ids": [1], "sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"token_ids": [1], "sampling": {"max_tokens": 4}}, "sampling.max_tokens"),
        ({"token_ids": [1], "prompt": "x"}, "prompt"),
        ({}, "token_ids"),
        ([], ""),
        ({"token_ids": ["1"]}, "token_ids.0"),
        ({"token_ids": [10**30]}, "token_ids.0"),
        ({"token_ids": [1.5]}, "token_ids.0"),
        ({"token_ids": [True]}, "token_ids.0"),
        ({"token_ids": [1], "sampling": {"seed": 10**30}}, "sampling.seed"),
        ({"token_ids": [1], "sampling": {"max_new_tokens": 10**30}}, "sampling.max_new_tokens"),
        ({"token_ids": [1], "sampling": {"top_p": 0.9}}, "sampling.top_p"),
        ({"token_ids": [1], "sampling": {"top_k": 5}}, "sampling.top_k"),
        ({"token_ids": [1], "deadline_s": 0}, "deadline_s"),
    ],
)
async def test_a_bad_request_is_refused_by_field(server: RunningServer, body: Any, field: str) -> None:
    response = await post(server, body)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == field
    assert response.json()["error"]["message"]


async def test_too_new_a_version_is_a_conflict(server: RunningServer) -> None:
    response = await post(server, {"token_ids": [1], "min_version": 4})
    assert response.status_code == 409
    assert "holds version 0" in response.json()["error"]["message"]


async def test_health_metrics_and_models(server: RunningServer) -> None:
    await post(server, {"token_ids": [1], "sampling": {"max_new_tokens": 7}})
    health = await get(server, "/health")
    assert health.status_code == 200
    assert health.json()["ok"]
    assert health.json()["engine"]["name"] == "fake"
    metrics = (await get(server, "/metrics")).text
    assert "penstock_rollout_tokens_total 7.0" in metrics
    assert 'penstock_rollout_requests_total{outcome="length"} 1.0' in metrics
    models = (await get(server, "/v1/models")).json()
    assert models["data"][0]["id"] == "fake"


async def test_a_late_joiner_loads_the_newest_weights_before_it_registers(queue: StubQueue, tmp_path: Path) -> None:
    queue.announce(3)
    async with rollout_server(queue, tmp_path) as server:
        assert server.engine.loaded == [3]
        assert {beat.version for beat in queue.heartbeats} == {3}


async def test_new_versions_are_pulled_under_a_request_and_reported(server: RunningServer) -> None:
    asking = asyncio.create_task(post(server, {"token_ids": [1], "sampling": {"max_new_tokens": 400}}))
    await server.until(lambda: server.engine.running == 1)
    server.queue.announce(1)
    server.queue.announce(2)
    await server.until(lambda: server.queue.registered["s0"].version == 2)
    _, spans, _ = answer_of(await asking)
    assert [span[0] for span in spans] == sorted(span[0] for span in spans)
    assert {span[0] for span in spans} == {0, 2}
    assert server.engine.loaded == [2]
    assert [(update.version, update.in_flight) for update in server.queue.reported] == [(2, 1)]


async def test_a_queue_that_went_back_is_followed(server: RunningServer) -> None:
    """It lost its last second: version 2 is not announced any more, then a second time with other weights."""
    for version, weights in ((1, "a"), (2, "b"), (1, "a"), (2, "c")):
        server.queue.announce(version, weights=weights)
        await server.until(lambda n=len(server.engine.loaded): len(server.engine.loaded) > n)
    server.queue.announce(2, weights="c", file=__file__)
    await asyncio.sleep(0.4)  # the same weights in another file are no reason to load
    assert server.engine.loaded == [1, 2, 1, 2]


async def test_refused_weights_leave_the_server_up_until_better_ones_come(server: RunningServer) -> None:
    server.queue.announce(1, damaged="lm_head")
    async with asyncio.timeout(60):
        while (await get(server, "/health")).json()["weights_refused"] != 1:
            await asyncio.sleep(0.02)
    health = (await get(server, "/health")).json()
    assert health["ok"]
    assert "'lm_head'" in health["cause"]
    assert (await post(server, {"token_ids": [1]})).status_code == 200
    await asyncio.sleep(0.4)
    assert "penstock_rollout_weights_refused_total 1.0" in (await get(server, "/metrics")).text
    server.queue.announce(2)
    await server.until(lambda: server.engine.loaded == [2])
    assert (await get(server, "/health")).json()["weights_refused"] is None


async def test_without_the_queue_it_goes_on_serving(server: RunningServer) -> None:
    url = server.url
    server.queue.down = True
    await asyncio.sleep(0.4)
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as http:
        assert (await http.post(f"{url}/generate", json={"token_ids": [1]})).status_code == 200
        assert "down" in (await http.get(f"{url}/health")).json()["queue"]
    server.queue.down = False
    server.queue.announce(1)
    await server.until(lambda: server.queue.registered["s0"].version == 1)


async def test_a_dead_engine_is_restarted_with_the_newest_weights(server: RunningServer) -> None:
    server.queue.announce(1)
    await server.until(lambda: server.queue.registered["s0"].version == 1)
    first = server.engine
    first.crash()
    await server.until(lambda: not server.queue.registered["s0"].accepting)
    response = await post(server, {"token_ids": [1]})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    await server.until(lambda: server.queue.registered["s0"].accepting)
    assert server.engine is not first
    assert server.engine.loaded == [1]
    ids, _, _ = answer_of(await post(server, {"token_ids": [1], "sampling": {"max_new_tokens": 5}}))
    assert ids == fake_answer([1], 5, version=1)


class NeverUp(FakeEngine):
    async def start(self) -> EngineInfo:
        raise EngineError("no such model")


async def test_an_engine_that_never_comes_up_ends_the_server_with_the_cause(queue: StubQueue, tmp_path: Path) -> None:
    job = ServerJob("s0", RunContext(queue, "fake", TOKEN), small_config(max_restarts=1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"2 times in a row.*no such model"):
        await asyncio.wait_for(serve(job, NeverUp), 60)
    assert queue.heartbeats == []


async def test_drain_lets_requests_end_then_the_server(server: RunningServer) -> None:
    asking = asyncio.create_task(post(server, {"token_ids": [1], "sampling": {"max_new_tokens": 300}}))
    await server.until(lambda: server.engine.running == 1)
    url = server.url
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as http:
        assert (await http.post(f"{url}/drain")).status_code == 202
        await server.until(lambda: "s0" not in server.queue.registered)
        assert (await http.post(f"{url}/generate", json={"token_ids": [1]})).status_code == 503
    ids, _, reason = answer_of(await asking)
    assert (len(ids), reason) == (300, "length")
    await asyncio.wait_for(server.task, 60)
    assert not await server.engine.healthy()


async def test_cancelling_the_server_is_a_drain(server: RunningServer) -> None:
    asking = asyncio.create_task(post(server, {"token_ids": [1], "sampling": {"max_new_tokens": 200}}))
    await server.until(lambda: server.engine.running == 1)
    server.task.cancel()
    ids, _, _ = answer_of(await asking)
    assert len(ids) == 200
    with pytest.raises(asyncio.CancelledError):
        await server.task
    assert server.queue.registered == {}


async def test_a_client_that_goes_away_frees_the_engine(server: RunningServer) -> None:
    body = {"token_ids": [1], "sampling": {"max_new_tokens": 500}}
    async with (
        httpx.AsyncClient(headers=HEADERS, timeout=60) as http,
        http.stream("POST", f"{server.url}/generate", json=body) as response,
    ):
        async for _ in response.aiter_lines():
            break
    await server.until(lambda: server.engine.running == 0)


async def test_more_requests_than_slots_wait_in_the_sidecar(queue: StubQueue, tmp_path: Path) -> None:
    config = small_config(max_concurrent=2)
    async with rollout_server(queue, tmp_path, token_s=0.002, config=config) as server:
        body = {"token_ids": [1], "sampling": {"max_new_tokens": 30}}
        asking = [asyncio.create_task(post(server, body)) for _ in range(6)]
        most = 0
        while not all(task.done() for task in asking):
            most = max(most, server.engine.running)
            await asyncio.sleep(0.005)
        assert most == 2
        assert [len(answer_of(task.result())[0]) for task in asking] == [30] * 6


class Echo:
    """Routes given from above: one path that the key ``sesame`` opens too."""

    def __init__(self, sidecar: Sidecar, url: str) -> None:
        self.router, self.closed = APIRouter(), False
        self.seen: list[tuple[str, str]] = []

        @self.router.get("/more/{name}")
        async def more(name: str) -> dict[str, Any]:
            return {"name": name, "url": url, "version": sidecar.version}

    def allows(self, path: str, token: str) -> bool:
        self.seen.append((path, token))
        return path.startswith("/more/") and token == "sesame"

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def marked(scope: Scope, receive: Receive, send: Send) -> None:
            async def sends(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"].append((b"wrapped", b"yes"))
                await send(message)

            await app(scope, receive, sends)

        return marked

    async def close(self) -> None:
        self.closed = True


async def test_routes_from_above_are_mounted_with_keys_of_their_own(queue: StubQueue, tmp_path: Path) -> None:
    made: list[Echo] = []

    def mount(sidecar: Sidecar, url: str) -> Echo:
        made.append(Echo(sidecar, url))
        return made[-1]

    async with rollout_server(queue, tmp_path, mount=mount) as server, httpx.AsyncClient(timeout=60) as http:
        url, keys = (
            server.url,
            {"right": "Bearer sesame", "run": f"Bearer {TOKEN}", "wrong": "Bearer x", "bare": "sesame"},
        )
        for key, status in (("right", 200), ("run", 200), ("wrong", 401), ("bare", 401)):
            response = await http.get(f"{url}/more/a", headers={"Authorization": keys[key]})
            assert (response.status_code, response.headers["wrapped"]) == (status, "yes")
        assert (await http.get(f"{url}/more/a", headers=HEADERS)).json() == {"name": "a", "url": url, "version": 0}
        assert (await http.get(f"{url}/health", headers={"Authorization": keys["right"]})).status_code == 401
        assert made[0].seen == [("/more/a", "sesame"), ("/more/a", "x"), ("/health", "sesame")]
        assert not made[0].closed
    assert made[0].closed


async def test_a_port_in_use_is_named(queue: StubQueue, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = ServerJob("s0", RunContext(queue, "fake", TOKEN), small_config(), tmp_path, port=port)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=f"rollout.port.* {port} "):
            await serve(job, FakeEngine)


def test_engines_are_found_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from penstock.rollout_server import make_engine

    engine: Engine = make_engine(RolloutConfig(), "model", tmp_path, 0)
    assert type(engine).__name__ == "HFEngine"
