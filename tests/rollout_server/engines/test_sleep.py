"""vLLM and SGLang give their devices up and have them back: which calls in which order, against stand-ins that keep
what an engine keeps, and sample whenever they may."""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.conftest import ask, join_chunks, small_config, whole
from tests.rollout_server.engines.http.event_server import serving, sglang_event, vllm_event

from penstock.rollout_server import Chunk, EngineError, EngineInfo
from penstock.rollout_server.engines.http.event_client import EventClient
from penstock.rollout_server.engines.sglang.engine import SGLangEngine
from penstock.rollout_server.engines.sglang.weights import SGLangWeights
from penstock.rollout_server.engines.vllm.engine import VLLMEngine
from penstock.rollout_server.engines.vllm.weights import VLLMWeights
from penstock.weight_sync import ChainFile, Manifest, WeightsRefused, state_of

pytest.importorskip("torch")

MANIFEST = Manifest("shm", (ChainFile(3, None, "/dev/null", 0, "", state_of(())),), ())
PATIENCE_S = 60.0
QUIET_S = 0.3
"""A stand-in that may sample does so thirty times meanwhile."""


class StandIn(ABC):
    """A server: `call` is what its control routes do, `answer` its route for tokens."""

    parts = frozenset({"weights", "kv_cache"})
    name, alive, end_of_it = "the stand-in", True, "was ended"

    def __init__(self, folder: Path, level: int) -> None:
        self.folder, self.sleep_level = folder, level
        self.calls: list[tuple[str, Any]] = []
        self.fails = ""
        """A route that is answered by an error."""
        self.version = "0"
        self.resident = set(self.parts)
        self.holds_weights = True
        self.paused = False
        self.aborts = 0
        self.wrongly = 0
        """Tokens that were sampled without weights or cache."""
        self.streams: set[Any] = set()
        self.events: EventClient

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self.calls.append((path, body))
        if self.fails and path.startswith(self.fails):
            raise EngineError(f"{path} failed")
        return self.does(path, dict(body or {}))

    @abstractmethod
    def does(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a route answers."""

    @abstractmethod
    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        """Of an answer's stream."""

    def loaded(self, version: str) -> None:
        assert "weights" in self.resident, "there is no memory to load into"
        self.version, self.holds_weights = version, True

    def release(self, parts: set[str], *, keeps_weights: bool) -> None:
        self.resident -= parts
        self.holds_weights = self.holds_weights and keeps_weights

    async def answer(self, request: web.Request) -> web.StreamResponse:
        wanted = await request.json()
        left = wanted.get("sampling_params", {}).get("max_tokens") or wanted["sampling_params"]["max_new_tokens"]
        response, aborts, count = web.StreamResponse(), self.aborts, 0
        await response.prepare(request)
        reason = None
        while reason is None:
            await asyncio.sleep(0.01)
            if self.aborts > aborts:
                reason, ids = "abort", []
            elif self.paused:
                continue
            else:
                self.wrongly += not (self.holds_weights and self.resident >= self.parts)
                ids, count = [7], count + 1
                reason = "length" if count == left else None
            await response.write(f"data: {json.dumps(self.event(ids, reason, count))}\n\n".encode())
        return response

    def cause(self) -> str:
        return "its log is empty"

    def tail(self) -> str:
        return ""

    async def stop(self) -> None:
        self.alive = False
        for stream in self.streams:
            stream.break_off("the server is being stopped")

    @property
    def asked(self) -> list[str]:
        """Paths of all calls, with what is asked in them."""
        return [path for path, _ in self.calls]


class VLLM(StandIn):
    """vLLM's sleep: `/wake_up` with tags leaves the rest asleep, and the scheduler paused until all is awake."""

    def does(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        route, _, query = path.partition("?")
        said: dict[str, Any] = {"weight_version": self.version}
        if route == "/sleep":
            self.paused = True
            self.aborts += 1
            self.release(set(self.parts), keeps_weights="level=1" in query)
        elif route == "/wake_up":
            tags = {word.removeprefix("tags=") for word in query.split("&") if word}
            self.resident |= tags or self.parts
            awake = self.resident >= self.parts
            self.paused = self.paused and not awake
            said = {"status": "awake" if awake else "sleeping"}
        elif route == "/pause":
            self.paused = True
            self.aborts += "mode=abort" in query
        elif route == "/resume":
            self.paused = False
        elif info := body.get("update_info"):
            if info["phase"] == "load":
                self.loaded("3")
            (Path(info["report"]) / "101").write_text("")
        return said

    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        return vllm_event(ids, reason, [(int(self.version), 0, count)] if reason else None)


class SGLang(StandIn):
    """SGLang's memory by tags. A paused one takes requests, and samples nothing for them."""

    parts = frozenset({"weights", "kv_cache", "cuda_graph"})

    def does(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/pause_generation":
            self.paused = True
            self.aborts += body["mode"] == "abort"
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/release_memory_occupation":
            assert self.paused, "it would die: it is not idle"
            self.release(set(body["tags"]), keeps_weights=self.sleep_level == 1 or "weights" not in body["tags"])
        elif path == "/resume_memory_occupation":
            self.resident |= set(body["tags"])
        elif path == "/update_weights_from_disk":
            self.loaded(body["weight_version"])
        return {"weight_version": self.version, "ranks": []}

    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        version = int(self.version)
        return sglang_event(ids, reason, [(version, 0, count)] if reason else None, version)


def vllm_on(server: VLLM, folder: Path) -> Any:
    engine = VLLMEngine(small_config(engine="vllm"), str(folder), folder, 0)
    weights = VLLMWeights(engine.config, str(folder), server, server.streams)  # type: ignore[arg-type]
    return engine, weights


def sglang_on(server: SGLang, folder: Path) -> Any:
    engine = SGLangEngine(small_config(engine="sglang"), str(folder), folder, 0)
    weights = SGLangWeights(engine.config, str(folder), server, server.streams)  # type: ignore[arg-type]
    version: Any = SimpleNamespace(check_unchanged=lambda: None)
    weights._read = lambda manifest: (os.open("/dev/null", os.O_RDONLY), {}, version)  # type: ignore[method-assign]
    return engine, weights


ENGINES: dict[str, tuple[Any, Any]] = {"vllm": (VLLM, vllm_on), "sglang": (SGLang, sglang_on)}
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


@asynccontextmanager
async def running(name: str, level: int, folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    """(engine, its stand-in), an engine that was started to sleep so deep."""
    kind, on = ENGINES[name]
    server = kind(folder, level)
    engine, weights = on(server, folder)
    engine.server, engine.streams, engine.labels, engine.weights = server, server.streams, weights, weights
    engine.info = EngineInfo(name=name, engine_version="1", version=0, vocab_size=99, max_model_len=2048)
    async with serving(server.answer) as server.events, asyncio.timeout(PATIENCE_S):
        yield engine, server
        await engine.stop()


def each(*levels: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "level"), [(name, level) for name in ENGINES for level in levels])


async def begun(engine: Any, length: int) -> asyncio.Task[Any]:
    """An answer that has tokens."""
    first = asyncio.Event()

    def note(chunk: Chunk) -> None:
        if chunk.token_ids:
            first.set()

    task = asyncio.create_task(whole(engine, ask([1, 2], length), note))
    await first.wait()
    return task


@each(1, 2)
async def test_the_order_of_a_turn(name: str, level: int, tmp_path: Path) -> None:
    async with running(name, level, tmp_path) as (engine, server):
        answer = await begun(engine, 1000)
        await engine.sleep(level)
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
        late = engine._send(ask([1, 2], 4), ())
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
        monkeypatch.setattr(server, "does", lambda path, body: {"status": "sleeping"})
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
