"""Sidecars in trouble: long queues, deadlines, engines that are silent or hung, weights that do not load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import (
    RunningServer,
    RunQueue,
    answer_of,
    body,
    fake_answer,
    rollout_server,
    small_config,
)

from penstock.rollout_server import Chunk, EngineError, EngineInfo, GenerateRequest, RolloutClient, Sampling
from penstock.rollout_server.server.request_queue import QUEUE_PER_SLOT
from penstock.testing import FakeEngine, fake_manifest
from penstock.transfer_queue import Announcement, QueueUnavailable, ServerInfo
from penstock.weight_sync import LoadReport, Manifest, WeightsRefused

SIDECAR = "penstock.rollout_server.server.sidecar"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SIDECAR}.HEALTH_S", 0.05)


async def test_burst_beyond_a_long_queue_is_sent_elsewhere(queue: RunQueue, tmp_path: Path) -> None:
    config, room = small_config(max_concurrent=1), 1 + QUEUE_PER_SLOT
    async with rollout_server(queue, tmp_path, token_s=0.05, config=config) as server:
        responses = await asyncio.gather(*[server.post(body(20)) for _ in range(room + 3)])
        refused = [response for response in responses if response.status_code != 200]
        assert [response.status_code for response in refused] == [429] * 3
        assert refused[0].headers["retry-after"] == "1"
        assert f"{room} requests are in flight here already" in refused[0].json()["error"]["message"]
        health = await server.status("/health")
        assert (health["in_flight"], health["in_flight_tokens"]) == (0, 0)


async def test_client_takes_a_full_server_for_full_not_for_broken(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    config = small_config(max_concurrent=1)
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
        assert client.refused > 0


async def test_client_tells_the_server_how_long_it_waits(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    async with rollout_server(queue, tmp_path, token_s=30.0) as server:
        with pytest.raises(EngineError, match=r"no whole answer: 0 tokens in 0.5 s \(rollout"):
            await client.generate(GenerateRequest(token_ids=[1], deadline_s=0.5))
        await server.until(lambda: server.engine.running == 0)
        assert client._router.describe() == "s0 v0 accepts"


class Mute(FakeEngine):
    """Answers that it is well, and samples nothing from its second request on."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        if self.asked > 0:
            await self._dead.wait()
            raise EngineError("the fake engine crashed")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.usefixtures("impatient")
async def test_idle_engine_is_asked_for_a_token_now_and_then(
    queue: RunQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SIDECAR}.PROBE_S", 0.3)
    monkeypatch.setattr(f"{SIDECAR}.PROBE_TIMEOUT_S", 3.0)
    async with rollout_server(queue, tmp_path, new_engine=Mute) as server:
        await server.until(lambda: server.engine.asked == 1)
        await server.until(lambda: len(server.engines) >= 2)
        assert (await server.status("/health"))["cause"] in ("", "an idle engine sampled no token in 3 s")


@pytest.mark.usefixtures("impatient")
async def test_work_without_a_token_for_long_restarts_the_engine(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    config = small_config(request_timeout_s=1.0)
    async with rollout_server(queue, tmp_path, new_engine=Mute, config=config) as server:
        server.engine.asked = 1
        answer = await client.generate(GenerateRequest(token_ids=[1], sampling=Sampling(max_new_tokens=5)))
        assert answer.token_ids == fake_answer([1], 5)
        assert len(server.engines) == 2


class Picky(FakeEngine):
    """Refuses every load until `willing`."""

    willing = False

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        if not self.willing:
            raise WeightsRefused(f"version {manifest.version}: no")
        return await super().load_weights(manifest)


async def test_weights_says_what_is_held_and_what_went_wrong(queue: RunQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path) as server:
        queue.announce(1)
        await server.until(lambda: server.engine.loaded == [1])
        queue.announce(3, damaged="lm_head")
        status = await server.status("/weights", lambda found: found["refused"] is not None)
        assert (status["version"], status["newest"], status["behind_versions"], status["refused"]) == (1, 3, 2, 3)
        assert status["last"]["version"] == 1
        assert "'lm_head'" in status["cause"]
        assert [(load["version"], load["outcome"]) for load in status["history"]] == [(1, "loaded"), (3, "refused")]
        assert status["behind_s"] > 0
        assert "penstock_rollout_version_lag 2.0" in (await server.get("/metrics")).text


async def test_pull_tries_refused_weights_again(queue: RunQueue, tmp_path: Path) -> None:
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        queue.announce(1)
        assert (await server.post({"action": "pull"}, "/weights")).json()["refused"] == 1
        server.engine.willing = True
        status = (await server.post({"action": "pull"}, "/weights")).json()
        assert (status["version"], status["refused"], status["cause"]) == (1, None, "")


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


async def test_malformed_announcements_are_refused_and_serving_goes_on(queue: RunQueue, tmp_path: Path) -> None:
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
        assert (await server.post(body())).status_code == 200
        queue.announce(4)
        await server.until(lambda: queue.registered["s0"].version == 4)
        assert (queue.registered["s0"].refused, queue.registered["s0"].refusal) == (None, "")
        assert (server.engine.loaded, len(server.engines)) == ([1, 4], 1)


async def test_server_that_can_load_nothing_yet_is_in_the_registry_and_takes_no_request(
    queue: RunQueue, tmp_path: Path
) -> None:
    queue.announce(3, damaged="lm_head")
    async with rollout_server(queue, tmp_path, up=False) as server:
        await server.until(lambda: "s0" in queue.registered)
        entry = queue.registered["s0"]
        assert (entry.accepting, entry.refused) == (False, 3)
        assert "'lm_head'" in entry.refusal


async def refuse(server: RunningServer, versions: range) -> None:
    for version in versions:
        server.queue.announce(version)
        await server.status("/weights", lambda found, version=version: found["refused"] == version)


@pytest.mark.usefixtures("impatient")
async def test_straggler_is_drained_and_its_engine_starts_over(queue: RunQueue, tmp_path: Path) -> None:
    """Three refusals in a row, and another server that has newer weights: it is this one's fault."""

    def new_engine(*arguments: Any) -> FakeEngine:
        engine = Picky(*arguments, token_s=0.01)
        engine.willing = bool(made)
        made.append(engine)
        return engine

    made: list[FakeEngine] = []
    async with rollout_server(queue, tmp_path, new_engine=new_engine) as server:
        await refuse(server, range(1, 4))
        asking = asyncio.create_task(server.post(body(100)))
        await server.until(lambda: server.engine.running == 1)
        assert len(made) == 1
        queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 3)
        await server.until(lambda: not queue.registered["s0"].accepting)
        assert answer_of(await asking)[0] == fake_answer([1], 100)
        await server.up()
        assert len(made) == 2
        assert made[1].loaded == [3]
        assert queue.registered["s0"].version == 3


@pytest.mark.usefixtures("impatient")
async def test_weights_that_no_server_can_load_restart_nobody(queue: RunQueue, tmp_path: Path) -> None:
    queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 0)
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        await refuse(server, range(1, 6))
        await asyncio.sleep(0.3)
        assert len(server.engines) == 1
        assert (await server.status("/health"))["ok"]


@pytest.mark.usefixtures("impatient")
async def test_being_behind_for_long_counts_as_well(
    queue: RunQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weight_sync.updater.STRAGGLER_S", 0.2)
    queue.registered["other"] = ServerInfo("other", "http://127.0.0.1:9", 2)
    async with rollout_server(queue, tmp_path, new_engine=Picky) as server:
        await refuse(server, range(1, 2))
        await asyncio.sleep(0.4)
        assert len(server.engines) == 1  # one version is not far
        queue.announce(2)
        await server.until(lambda: len(server.engines) >= 2)


async def test_engine_that_never_answered_is_waited_for_ever_longer(
    queue: RunQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    async def note(delay_s: float) -> None:
        rests.append(delay_s)

    monkeypatch.setattr(f"{SIDECAR}.restart_after", note)
    async with rollout_server(queue, tmp_path, new_engine=partial(FakeEngine, token_s=0.001)) as server:
        for lives in range(1, 5):
            server.engine.crash()
            await server.until(lambda lives=lives: len(server.engines) == lives + 1)
            await server.up()
            if lives == 3:
                assert (await server.post(body(3))).status_code == 200
    assert rests[0] < rests[1] < rests[2]
    assert rests[3] < rests[1]


# builds of engines ---------------------------------------------------------------------------------------------------
OTHER = ServerInfo("other", "http://10.0.0.7:8101", 0, engine="vllm 0.33.0")


async def test_engine_of_another_build_is_refused_by_name_before_it_serves(
    queue: RunQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SIDECAR}.restart_after", lambda _s: asyncio.sleep(0))
    queue.registered["other"] = OTHER
    async with rollout_server(queue, tmp_path, up=False, config=small_config(max_restarts=1)) as server:
        with pytest.raises(EngineError) as refused:
            await asyncio.wait_for(server.task, 30)
        assert "s0" not in queue.registered
    for word in ("rollout.engine", "s0 is fake 1", "other at http://10.0.0.7:8101", "Install vllm 0.33.0"):
        assert word in str(refused.value)
    # One that is alike, and one that does not say, as a server of an earlier release.
    queue.registered["other"] = replace(OTHER, engine="fake 1")
    queue.registered["old"] = replace(OTHER, server_id="old", engine="")
    async with rollout_server(queue, tmp_path) as server:
        assert queue.registered["s0"].engine == "fake 1"


class NextBuild(FakeEngine):
    async def start(self) -> EngineInfo:
        return (await super().start()).model_copy(update={"engine_version": "2"})


async def test_of_two_builds_that_start_together_one_serves(queue: RunQueue, tmp_path: Path) -> None:
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


async def test_builds_are_not_compared_while_the_queue_is_away(queue: RunQueue, tmp_path: Path) -> None:
    """Never stop for the queue: the server serves, and is compared when its engine starts again."""
    queue.registered["other"] = OTHER

    async def away() -> list[ServerInfo]:
        raise QueueUnavailable("away")

    queue.servers = away  # type: ignore[method-assign]
    async with rollout_server(queue, tmp_path):
        assert queue.registered["s0"].accepting
