"""vLLM and SGLang give their devices up and have them back: which calls in which order, against stand-ins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conformance.subject import sets
from tests.rollout_server.conftest import ask, join_chunks, whole
from tests.rollout_server.engines.sglang.sglang_types import TAGS
from tests.rollout_server.engines.stand_ins import MANIFEST, SERVERS, TYPES, VLLM_TAGS, running

from penstock.rollout_server import Chunk, EngineError
from penstock.rollout_server.engines.sglang import weights as sglang
from penstock.rollout_server.engines.vllm import weights as vllm
from penstock.weight_sync import WeightsRefused

pytest.importorskip("torch")

PATIENCE_S = 60.0
QUIET_S = 0.3
"""A stand-in that may sample does so thirty times meanwhile."""
SLEEP: dict[str, dict[int, list[str]]] = {
    "vllm": {level: [f"/sleep?level={level}&mode=abort"] for level in (1, 2)},
    "sglang": {level: ["/pause_generation", "/release_memory_occupation"] for level in (1, 2)},
}
WAKE = {
    "vllm": {1: ["/wake_up"], 2: ["/wake_up?tags=weights"]},
    "sglang": {1: ["/resume_memory_occupation", "/continue_generation"], 2: ["/resume_memory_occupation"]},
}
LOAD = {
    "vllm": [
        *("/start_weight_update", "/update_weights", "/pause?mode=keep&clear_cache=false", "/update_weights"),
        *("/finish_weight_update", "/weight_info"),
    ],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/model_info"],
}
CONTINUE = {
    "vllm": {1: ["/resume"], 2: ["/wake_up?tags=kv_cache"]},
    "sglang": {level: ["/continue_generation"] for level in (1, 2)},
}


def each(*levels: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "level"), [(name, level) for name in SERVERS for level in levels])


@each(1, 2)
async def test_the_order_of_a_turn(name: str, level: int, tmp_path: Path) -> None:
    async with running(name, level, tmp_path) as (engine, server):
        first = asyncio.Event()
        answer = asyncio.create_task(whole(engine, ask([1, 2], 1000), sets(first)))
        await first.wait()
        salt = engine.weights.cache_salt
        await engine.sleep(level)
        assert engine.weights.cache_salt != salt, "no prefix is left"
        ended = await answer
        assert (ended.finish_reason, len(ended.token_ids) > 0) == ("abort", True)
        assert server.asked == SLEEP[name][level]
        assert (server.resident, server.holds_weights) == (set(), level == 1)
        asleep = await whole(engine, ask([1, 2], 4))
        assert (asleep.finish_reason, asleep.token_ids) == ("abort", [])
        server.calls.clear()
        await engine.wake()
        assert server.asked == WAKE[name][level]
        if level == 1:
            await engine_samples(engine, version=0)
        server.calls.clear()
        assert (await engine.load_weights(MANIFEST)).version == 3
        assert server.asked == [*LOAD[name], *CONTINUE[name][level]]
        await engine_samples(engine, version=3)
        assert (server.resident, server.wrongly) == (server.parts, 0)
        server.calls.clear()
        await engine.load_weights(MANIFEST)
        assert server.asked == [*LOAD[name], *CONTINUE[name][1]], "a later version finds the engine awake"


async def engine_samples(engine: Any, version: int) -> None:
    answer = await whole(engine, ask([1, 2], 4))
    assert (answer.finish_reason, answer.version_spans) == ("length", [(version, 0, 4)])


@each(2)
async def test_nothing_is_sampled_before_dropped_weights_are_there(name: str, level: int, tmp_path: Path) -> None:
    """Nor for a request that was on its way when the server fell asleep, and waits in it."""
    async with running(name, level, tmp_path) as (engine, server):
        await engine.sleep(level)
        late = engine._send(ask([1, 2], 4), (), None)
        engine.streams.add(late)
        found = asyncio.create_task(all_of(late))
        await asyncio.sleep(QUIET_S)
        await engine.wake()
        new = asyncio.create_task(whole(engine, ask([3], 4)))
        await asyncio.sleep(QUIET_S)
        assert (late.received, new.done(), server.wrongly) == (0, False, 0)
        await engine.load_weights(MANIFEST)
        assert (await found).version_spans == (await new).version_spans == [(3, 0, 4)]
        assert server.wrongly == 0
        engine.streams.discard(late)


async def all_of(stream: Any) -> Chunk:
    total = Chunk()
    async for chunk in stream.chunks(PATIENCE_S):
        total = join_chunks(total, chunk)
    return total


@each(2)
async def test_a_version_that_is_refused_leaves_it_without_weights(
    name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(name, level, tmp_path) as (engine, server):
        await engine.sleep(level)
        await engine.wake()

        async def refuse(version: int, fetched: Any) -> None:
            raise WeightsRefused("tensor 'a' differs")

        with monkeypatch.context() as patch:
            patch.setattr(engine.weights, "_load", refuse)
            with pytest.raises(WeightsRefused):
                await engine.load_weights(MANIFEST)
        waiting = asyncio.create_task(whole(engine, ask([1], 4)))
        await asyncio.sleep(QUIET_S)
        assert (waiting.done(), server.wrongly, server.alive) == (False, 0, True)
        if name == "vllm":
            await engine.weights._finish()  # as a refusal of its workers does
        await engine.load_weights(MANIFEST)
        assert (await waiting).version_spans == [(3, 0, 4)]
        assert server.wrongly == 0


@each(2)
async def test_it_may_sleep_again_before_a_version_came(name: str, level: int, tmp_path: Path) -> None:
    async with running(name, level, tmp_path) as (engine, server):
        for again in (level, 1):
            await engine.sleep(again)
            await engine.wake()
        await engine.load_weights(MANIFEST)
        await engine_samples(engine, version=3)
        assert (server.resident, server.wrongly) == (server.parts, 0)


@each(1, 2)
@pytest.mark.parametrize("when", ["sleep", "wake"])
async def test_a_turn_that_fails_ends_the_engine(name: str, level: int, when: str, tmp_path: Path) -> None:
    """That frees the devices in any case."""
    async with running(name, level, tmp_path) as (engine, server):
        if when == "wake":
            await engine.sleep(level)
        server.fails = (SLEEP if when == "sleep" else WAKE)[name][level][0]
        answer = asyncio.create_task(engine.sleep(level) if when == "sleep" else engine.wake())
        with pytest.raises(EngineError, match="failed"):
            await answer
        assert not server.alive
        with pytest.raises(EngineError, match="not running"):
            await engine.load_weights(MANIFEST)


async def test_vllm_that_says_it_sleeps_still_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers 200 where it wakes nothing, and writes why into its log."""
    async with running("vllm", 1, tmp_path) as (engine, server):
        await engine.sleep(1)
        monkeypatch.setattr(server, "does", lambda method, path, body: {"status": "sleeping"})
        with pytest.raises(EngineError, match="sleeping"):
            await engine.wake()
        assert not server.alive


@pytest.mark.parametrize(("started", "level", "kept"), [(1, 1, False), (2, 2, False), (2, 1, True)])
async def test_sglang_keeps_weights_on_the_device_where_it_has_no_copy(
    started: int, level: int, kept: bool, tmp_path: Path
) -> None:
    """What was never announced can be loaded again only from a copy in host memory, which level 2 does without."""
    async with running("sglang", started, tmp_path) as (engine, server):
        await engine.sleep(level)
        assert ("weights" in server.resident) == kept
        assert server.holds_weights == (level == 1)
        tags = [body["tags"] for path, body in server.calls if path == "/release_memory_occupation"]
        await engine.wake()
        assert [body["tags"] for path, body in server.calls if path == "/resume_memory_occupation"] == tags


@each(1)
@pytest.mark.parametrize("pause", ["keep", "recompute", "abort"])
async def test_every_pause_is_asked_for_in_the_servers_terms(name: str, level: int, pause: str, tmp_path: Path) -> None:
    async with running(name, level, tmp_path, pause=pause) as (engine, server):
        await engine.load_weights(MANIFEST)
        if name == "vllm":
            assert f"/pause?{vllm.PAUSES[pause]}" in server.asked
        else:
            assert ("/pause_generation", {"mode": sglang.PAUSES[pause]}) in server.calls


def test_all_that_can_be_released_is() -> None:
    assert set(sglang.MEMORY_TAGS) == set(TYPES[TAGS].values())
    assert {"weights", "kv_cache"} == VLLM_TAGS
