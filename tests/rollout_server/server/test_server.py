"""A sidecar over HTTP, with fake engines: routes, tokens, refusals, weights pulled, engine restarts, the end."""

from __future__ import annotations

import asyncio
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
    RunQueue,
    answer_of,
    body,
    fake_answer,
    rollout_server,
    small_config,
)

from penstock.rollout_server import EngineError, EngineInfo, ServerJob, Sidecar, serve
from penstock.testing import FakeEngine
from penstock.transfer_queue import RunContext


@pytest.fixture
async def server(queue: RunQueue, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(queue, tmp_path, token_s=0.002) as running:
        yield running


async def test_health_metrics_and_models(server: RunningServer) -> None:
    assert (await server.post(body(7))).headers["content-type"] == "application/x-ndjson"
    health = await server.get("/health")
    assert (health.status_code, health.json()["ok"], health.json()["engine"]["name"]) == (200, True, "fake")
    metrics = (await server.get("/metrics")).text
    assert "penstock_rollout_tokens_total 7.0" in metrics
    assert 'penstock_rollout_requests_total{outcome="length"} 1.0' in metrics
    assert (await server.get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_a_late_joiner_loads_the_newest_weights_before_it_registers(queue: RunQueue, tmp_path: Path) -> None:
    queue.announce(3)
    async with rollout_server(queue, tmp_path) as server:
        assert server.engine.loaded == [3]
        assert {beat.version for beat in queue.heartbeats} == {3}


async def test_new_versions_are_pulled_under_a_request_and_reported(server: RunningServer) -> None:
    server.engine.token_s = 0.1  # the update comes within the answer
    asking = asyncio.create_task(server.post(body(400)))
    await server.until(lambda: server.engine.sampled > 0)
    server.queue.announce(1)
    server.queue.announce(2)
    await server.until(lambda: server.queue.registered["s0"].version == 2)
    server.engine.token_s = 0.0
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
    health = await server.status("/health", lambda found: found["weights_refused"] == 1)
    assert health["ok"]
    assert "'lm_head'" in health["cause"]
    assert (await server.post(body())).status_code == 200
    await asyncio.sleep(0.4)
    assert "penstock_rollout_weights_refused_total 1.0" in (await server.get("/metrics")).text
    server.queue.announce(2)
    await server.until(lambda: server.engine.loaded == [2])
    assert (await server.get("/health")).json()["weights_refused"] is None


async def test_without_the_queue_it_goes_on_serving(server: RunningServer) -> None:
    server.queue.down = True
    await asyncio.sleep(0.4)
    assert (await server.post(body())).status_code == 200
    await server.status("/health", lambda found: "down" in (found["queue"] or ""))
    server.queue.down = False
    server.queue.announce(1)
    await server.until(lambda: server.queue.registered["s0"].version == 1)


async def test_a_dead_engine_is_restarted_with_the_newest_weights(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.restart_after", lambda _s: refused.wait())
    server.queue.announce(1)
    await server.until(lambda: server.queue.registered["s0"].version == 1)
    first = server.engine
    first.crash()
    await server.until(lambda: not server.queue.registered["s0"].accepting)
    response = await server.post(body())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    refused.set()
    await server.until(lambda: server.queue.registered["s0"].accepting)
    assert server.engine is not first
    assert server.engine.loaded == [1]
    ids, _, _ = answer_of(await server.post(body(5)))
    assert ids == fake_answer([1], 5, version=1)


class NeverUp(FakeEngine):
    async def start(self) -> EngineInfo:
        raise EngineError("no such model")


async def test_an_engine_that_never_comes_up_ends_the_server_with_the_cause(queue: RunQueue, tmp_path: Path) -> None:
    job = ServerJob("s0", RunContext(queue, "fake", TOKEN), small_config(max_restarts=1), tmp_path)
    with pytest.raises(EngineError, match=r"2 times in a row.*no such model"):
        await asyncio.wait_for(serve(job, NeverUp), 60)
    assert queue.heartbeats == []


class NeverAble(FakeEngine):
    async def start(self) -> EngineInfo:
        raise EngineError("no such model anywhere", retryable=False)


async def test_an_engine_that_can_never_start_is_not_started_again(queue: RunQueue, tmp_path: Path) -> None:
    job = ServerJob("s0", RunContext(queue, "fake", TOKEN), small_config(max_restarts=1000), tmp_path)
    with pytest.raises(EngineError, match=r"^no such model anywhere$"):
        await asyncio.wait_for(serve(job, NeverAble), 60)


@pytest.mark.parametrize("how", ["route", "cancel"])
async def test_drain_lets_requests_end_then_the_server(queue: RunQueue, tmp_path: Path, how: str) -> None:
    async with rollout_server(queue, tmp_path, drain_s=60.0, token_s=0.05) as server:
        asking = asyncio.create_task(server.post(body(300)))
        await server.until(lambda: server.engine.running == 1)
        if how == "route":
            assert (await server.post(None, "/drain")).status_code == 202
        else:
            server.task.cancel()
        await server.until(lambda: "s0" not in server.queue.registered)
        assert (await server.post(body())).status_code == 503
        server.engine.token_s = 0.0
        ids, _, reason = answer_of(await asking)
        assert (len(ids), reason) == (300, "length")
        await asyncio.wait({server.task}, timeout=60)
        assert server.task.cancelled() == (how == "cancel")
        assert not await server.engine.healthy()


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


async def test_routes_from_above_are_mounted_with_keys_of_their_own(queue: RunQueue, tmp_path: Path) -> None:
    made: list[Echo] = []

    def mount(sidecar: Sidecar, url: str) -> Echo:
        made.append(Echo(sidecar, url))
        return made[-1]

    async with rollout_server(queue, tmp_path, mount=mount) as server, httpx.AsyncClient(timeout=60) as http:
        url = server.url
        for key, status in (("Bearer sesame", 200), (f"Bearer {TOKEN}", 200), ("Bearer x", 401), ("sesame", 401)):
            response = await http.get(f"{url}/more/a", headers={"Authorization": key})
            assert (response.status_code, response.headers["wrapped"]) == (status, "yes")
        assert (await server.get("/more/a")).json() == {"name": "a", "url": url, "version": 0}
        assert (await http.get(f"{url}/health", headers={"Authorization": "Bearer sesame"})).status_code == 401
        assert made[0].seen == [("/more/a", "sesame"), ("/more/a", "x"), ("/health", "sesame")]
        assert not made[0].closed
    assert made[0].closed


async def test_a_port_in_use_is_named(queue: RunQueue, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = ServerJob("s0", RunContext(queue, "fake", TOKEN), small_config(), tmp_path, port=port)
        with pytest.raises(OSError, match=f"rollout.port.* {port} "):
            await serve(job, FakeEngine)
