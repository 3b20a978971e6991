"""Sidecars in trouble: long queues, deadlines, engines that are silent or hung, weights that do not load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.rollout_server.conftest import (
    HEADERS,
    TOKEN,
    RunningServer,
    StubQueue,
    fake_answer,
    rollout_server,
    small_config,
)

from penstock.rollout_server import Chunk, EngineError, EngineInfo, GenerateRequest, RolloutClient, Sampling
from penstock.rollout_server.server.process import KEPT_LOGS, bound_logs
from penstock.rollout_server.server.request_queue import QUEUE_PER_SLOT
from penstock.testing import FakeEngine, fake_manifest
from penstock.transfer_queue import Announcement, QueueUnavailable, ServerInfo
from penstock.weight_sync import LoadReport, Manifest, WeightsRefused


@pytest.fixture
def queue() -> StubQueue:
    return StubQueue()


def body(count: int, **changes: Any) -> dict[str, Any]:
    return {"token_ids": [1], "sampling": {"max_new_tokens": count}, **changes}


async def post(server: RunningServer, path: str, content: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, headers=HEADERS) as http:
        return await http.post(server.url + path, json=content)


async def get(server: RunningServer, path: str) -> Any:
    async with httpx.AsyncClient(timeout=20, headers=HEADERS) as http:
        return (await http.get(server.url + path)).json()


async def test_beyond_a_long_queue_requests_are_sent_elsewhere(queue: StubQueue, tmp_path: Path) -> None:
    """Of a burst as well: nobody is let in before the one before is counted."""
    config, room = small_config(max_concurrent=1), 1 + QUEUE_PER_SLOT
    async with (
        rollout_server(queue, tmp_path, token_s=0.05, config=config) as server,
        httpx.AsyncClient(timeout=30, headers=HEADERS) as http,
    ):
        url = f"{server.url}/generate"
        responses = await asyncio.gather(*[http.post(url, json=body(20)) for _ in range(room + 3)])
        refused = [response for response in responses if response.status_code != 200]
        assert [response.status_code for response in refused] == [429] * 3
        assert refused[0].headers["retry-after"] == "1"
        assert f"{room} requests are in flight here already" in refused[0].json()["error"]["message"]
        health = (await http.get(f"{server.url}/health")).json()
        assert (health["in_flight"], health["in_flight_tokens"]) == (0, 0)


async def test_a_client_takes_a_full_server_for_full_not_for_broken(queue: StubQueue, tmp_path: Path) -> None:
    config = small_config(max_concurrent=1)
    client = RolloutClient(queue, TOKEN, timeout_s=30)
    async with (
        rollout_server(queue, tmp_path, name="s0", token_s=0.004, config=config) as one,
        rollout_server(queue, tmp_path, name="s1", token_s=0.004) as other,
    ):
        client._router._home = one.url
        requests = [
            GenerateRequest(token_ids=[1, i], sampling=Sampling(max_new_tokens=60), episode_id=f"e{i}")
            for i in range(9)
        ]
        answers = await asyncio.gather(*map(client.generate, requests))
        assert [answer.token_ids for answer in answers] == [fake_answer([1, i], 60) for i in range(9)]
        assert set(client._router._sticky.values()) == {one.url, other.url}
        assert "rests" not in client._router.describe()
    await client.close()


async def test_a_deadline_before_the_first_token_is_504_and_frees_the_engine(queue: StubQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path, token_s=30.0) as server:
        response = await post(server, "/generate", body(5, deadline_s=0.2))
        assert response.status_code == 504
        assert response.json()["error"]["field"] == "deadline_s"
        await server.until(lambda: server.engine.running == 0)
        assert (await get(server, "/health"))["in_flight_tokens"] == 0


async def test_a_deadline_in_mid_answer_ends_it_and_what_came_is_valid(queue: StubQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path, token_s=0.1) as server:
        response = await post(server, "/generate", body(400, deadline_s=5.0))
        *chunks, last = [json.loads(line) for line in response.text.splitlines() if line]
        assert last["error"]["field"] == "deadline_s"
        ids = [token for chunk in chunks for token in chunk["token_ids"]]
        assert ids == fake_answer([1], len(ids))
        assert 0 < len(ids) < 400
        await server.until(lambda: server.engine.running == 0)


async def test_the_client_tells_the_server_how_long_it_waits(queue: StubQueue, tmp_path: Path) -> None:
    client = RolloutClient(queue, TOKEN, timeout_s=60)
    async with rollout_server(queue, tmp_path, token_s=30.0) as server:
        request = GenerateRequest(token_ids=[1], deadline_s=0.5)
        with pytest.raises(Exception, match=r"no whole answer in 0.5 s \(0 tokens\)"):
            await client.generate(request)
        await server.until(lambda: server.engine.running == 0)
        assert client._router.describe() == "s0 v0 accepts"
    await client.close()


class Mute(FakeEngine):
    """Answers that it is well, and samples nothing from its second request on."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        if self.asked > 0:
            await self._dead.wait()
            raise EngineError("the fake engine crashed")
        async for chunk in super().generate(request):
            yield chunk


async def test_an_idle_engine_is_asked_for_a_token_now_and_then(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.PROBE_S", 0.3)
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.HEALTH_S", 0.05)
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.PROBE_TIMEOUT_S", 3.0)
    async with rollout_server(queue, tmp_path, new_engine=Mute) as server:
        await server.until(lambda: server.engine.asked == 1)
        await server.until(lambda: len(server.engines) >= 2)
        assert (await get(server, "/health"))["cause"] in ("", "an idle engine sampled no token in 3 s")


async def test_work_without_a_token_for_long_restarts_the_engine(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.HEALTH_S", 0.05)
    client = RolloutClient(queue, TOKEN, timeout_s=30)
    config = small_config(request_timeout_s=1.0)
    async with rollout_server(queue, tmp_path, new_engine=Mute, config=config) as server:
        server.engine.asked = 1
        answer = await client.generate(GenerateRequest(token_ids=[1], sampling=Sampling(max_new_tokens=5)))
        assert answer.token_ids == fake_answer([1], 5)
        assert len(server.engines) == 2
    await client.close()


class Picky(FakeEngine):
    """Refuses every load until `willing`."""

    willing = False

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        if not self.willing:
            raise WeightsRefused(f"version {manifest.version}: no")
        return await super().load_weights(manifest)


async def test_weights_says_what_is_held_and_what_went_wrong(queue: StubQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path) as server:
        queue.announce(1)
        await server.until(lambda: server.engine.loaded == [1])
        queue.announce(3, damaged="lm_head")
        async with asyncio.timeout(60):
            while (status := await get(server, "/weights"))["refused"] is None:
                await asyncio.sleep(0.02)
        assert (status["version"], status["newest"], status["behind_versions"], status["refused"]) == (1, 3, 2, 3)
        assert status["last"]["version"] == 1
        assert "'lm_head'" in status["cause"]
        assert [(load["version"], load["outcome"]) for load in status["history"]] == [(1, "loaded"), (3, "refused")]
        assert status["behind_s"] > 0


async def test_pull_tries_refused_weights_again(queue: StubQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        queue.announce(1)
        await server.until(lambda: queue.announced is not None)
        assert (await post(server, "/weights", {"action": "pull"})).json()["refused"] == 1
        server.engine.willing = True
        response = await post(server, "/weights", {"action": "pull"})
        assert response.status_code == 200
        assert (response.json()["version"], response.json()["refused"], response.json()["cause"]) == (1, None, "")
        for wrong in ({"action": "push"}, {}, {"action": "pull", "version": 2}):
            assert (await post(server, "/weights", wrong)).status_code == 422


WHOLE = fake_manifest(3)


MALFORMED: list[Any] = [
    {},
    "weights",
    [WHOLE],
    {name: value for name, value in WHOLE.items() if name != "bytes"},
    {**WHOLE, "version": 2},
    {**WHOLE, "version": "three"},
    {**WHOLE, "transport": ["shm"]},
    {**WHOLE, "path": None},
    {**WHOLE, "tensors": "w"},
    {**WHOLE, "tensors": [["w", [1], "float32", "00"]]},
    {**WHOLE, "chain": [{"version": 2}]},
    {**WHOLE, "adapter": []},
]


async def test_malformed_announcements_are_refused_and_serving_goes_on(queue: StubQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path) as server:
        queue.announce(1)
        await server.until(lambda: server.engine.loaded == [1])
        for manifest in MALFORMED:
            queue.announced = Announcement(3, manifest)
            await server.until(lambda: queue.registered["s0"].refused == 3)
            entry = queue.registered["s0"]
            assert entry.refusal.startswith("version 3 refused, version 1 stays: "), manifest
            assert (entry.version, entry.accepting) == (1, True)
            queue.announced = Announcement(1, manifest)  # a queue that went back
            await server.until(lambda: queue.registered["s0"].refused == 1)
        assert (await post(server, "/generate", body(5))).status_code == 200
        queue.announce(4)
        await server.until(lambda: queue.registered["s0"].version == 4)
        assert (queue.registered["s0"].refused, queue.registered["s0"].refusal) == (None, "")
        assert (server.engine.loaded, len(server.engines)) == ([1, 4], 1)


async def test_a_server_that_can_load_nothing_yet_says_so(queue: StubQueue, tmp_path: Path) -> None:
    """It is in the registry, so that somebody hears of it, and takes no request."""
    queue.announce(3, damaged="lm_head")
    async with rollout_server(queue, tmp_path, up=False) as server:
        await server.until(lambda: "s0" in queue.registered)
        entry = queue.registered["s0"]
        assert (entry.accepting, entry.refused) == (False, 3)
        assert "'lm_head'" in entry.refusal


async def refuse(server: RunningServer, versions: range) -> None:
    for version in versions:
        server.queue.announce(version)
        async with asyncio.timeout(60):
            while (await get(server, "/weights"))["refused"] != version:
                await asyncio.sleep(0.02)


async def test_a_straggler_is_drained_and_its_engine_starts_over(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three refusals in a row, and another server that has newer weights: it is this one's fault."""
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.HEALTH_S", 0.05)

    def new_engine(*given: Any) -> FakeEngine:
        engine = Picky(*given, token_s=0.01)
        engine.willing = bool(made)
        made.append(engine)
        return engine

    made: list[FakeEngine] = []
    async with rollout_server(queue, tmp_path, new_engine=new_engine) as server:
        await refuse(server, range(1, 4))
        asking = asyncio.create_task(post(server, "/generate", body(100)))
        await server.until(lambda: server.engine.running == 1)
        assert len(made) == 1
        queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 3)
        await server.until(lambda: not queue.registered["s0"].accepting)
        assert len([line for line in (await asking).text.splitlines() if line]) > 0
        ids = [t for line in (await asking).text.splitlines() if line for t in json.loads(line)["token_ids"]]
        assert ids == fake_answer([1], 100)
        await server.up()
        assert len(made) == 2
        assert made[1].loaded == [3]
        assert queue.registered["s0"].version == 3


async def test_weights_that_no_server_can_load_restart_nobody(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.HEALTH_S", 0.05)
    queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 0)
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        await refuse(server, range(1, 6))
        await asyncio.sleep(0.3)
        assert len(server.engines) == 1
        assert (await get(server, "/health"))["ok"]


async def test_being_behind_for_long_counts_as_well(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.HEALTH_S", 0.05)
    monkeypatch.setattr("penstock.weight_sync.updater.STRAGGLER_S", 0.2)
    queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 2)
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        await refuse(server, range(1, 2))
        await asyncio.sleep(0.4)
        assert len(server.engines) == 1  # one version is not far
        queue.announce(2)
        await server.until(lambda: len(server.engines) == 2)


async def test_an_engine_that_never_answered_is_waited_for_ever_longer(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    real_sleep: Callable[[float], Any] = asyncio.sleep

    async def note(delay_s: float) -> None:
        rests.append(delay_s)
        await real_sleep(0)

    monkeypatch.setattr("penstock.rollout_server.server.sidecar.restart_after", note)
    async with rollout_server(queue, tmp_path, new_engine=partial(FakeEngine, token_s=0.001)) as server:
        for lives in range(1, 4):
            server.engine.crash()
            await server.until(lambda wanted=lives: len(server.engines) == wanted + 1)
            await server.up()
        assert rests[0] < rests[1] < rests[2]
        await server.up()
        assert (await post(server, "/generate", body(3))).status_code == 200
        server.engine.crash()
        await server.until(lambda: len(server.engines) == 5)
        assert rests[3] < rests[1]


def test_engine_logs_are_kept_and_bounded(tmp_path: Path) -> None:
    log = tmp_path / "engine-hf.log"
    log.touch(mode=0o600)
    with log.open("ab") as written_to:
        for life in range(6):
            written_to.write(b"%d" % life * 100)
            written_to.flush()
            bound_logs(tmp_path, max_bytes=150)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["engine-hf.log", *(f"engine-hf.log.{number}" for number in range(1, KEPT_LOGS + 1))]
    assert log.read_bytes() == b""
    assert [(tmp_path / f"engine-hf.log.{number}").read_bytes()[:1] for number in (1, 2)] == [b"4", b"2"]
    assert all(path.stat().st_size <= 250 for path in tmp_path.iterdir())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_an_engine_of_another_build_is_refused_by_name_before_it_serves(
    queue: StubQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.restart_after", lambda _s: asyncio.sleep(0))
    other = ServerInfo("other", "http://10.0.0.7:8101", 0, engine="vllm 0.33.0")
    queue.registered["other"] = other
    config = small_config(max_restarts=1)
    async with rollout_server(queue, tmp_path, up=False, config=config) as server:
        with pytest.raises(EngineError) as refused:
            await asyncio.wait_for(server.task, 30)
        assert "s0" not in queue.registered
    for word in ("rollout.engine", "s0 is fake 1", "other at http://10.0.0.7:8101", "Install vllm 0.33.0"):
        assert word in str(refused.value)
    # One that is alike, and one that does not say, as a server of an earlier release.
    queue.registered["other"] = replace(other, engine="fake 1")
    queue.registered["old"] = ServerInfo("old", "http://10.0.0.8:8101", 0)
    async with rollout_server(queue, tmp_path) as server:
        assert queue.registered["s0"].engine == "fake 1"


class NextBuild(FakeEngine):
    async def start(self) -> EngineInfo:
        return (await super().start()).model_copy(update={"engine_version": "2"})


async def test_of_two_builds_that_start_together_one_serves(queue: StubQueue, tmp_path: Path) -> None:
    """Each looks for others before either is in the registry."""
    look, looks, both = queue.servers, 0, asyncio.Event()

    async def look_together() -> list[ServerInfo]:
        nonlocal looks
        looks, found = looks + 1, await look()
        if looks == 2:
            both.set()
        await both.wait()
        return found

    queue.servers = look_together  # type: ignore[method-assign]
    config = small_config(max_restarts=0)
    async with (
        rollout_server(queue, tmp_path, name="s0", up=False, config=config) as one,
        rollout_server(queue, tmp_path, name="s1", up=False, config=config, new_engine=NextBuild) as other,
    ):
        await asyncio.wait({one.task, other.task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        refused, stays = (one, other) if one.task.done() else (other, one)
        with pytest.raises(EngineError, match=rf"{refused.name} is fake \d, and {stays.name} at .* has fake \d"):
            await asyncio.wait_for(refused.task, 30)
        await stays.up()
        assert list(queue.registered) == [stays.name]
        assert {beat.server_id for beat in queue.heartbeats if beat.accepting} == {stays.name}


async def test_builds_are_not_compared_while_the_queue_is_away(queue: StubQueue, tmp_path: Path) -> None:
    """Never stop for the queue: the server serves, and is compared when its engine starts again."""
    queue.registered["other"] = ServerInfo("other", "http://10.0.0.7:8101", 0, engine="vllm 0.33.0")

    async def away() -> list[ServerInfo]:
        raise QueueUnavailable("away")

    queue.servers = away  # type: ignore[method-assign]
    async with rollout_server(queue, tmp_path):
        assert queue.registered["s0"].accepting
