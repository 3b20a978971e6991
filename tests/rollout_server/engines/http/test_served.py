"""The engine `served`: a rollout server of ours, a server of completions, and servers that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.rollout_server.conftest import TOKEN, RunQueue, fake_answer, rollout_server

from penstock.rollout_server import Chunk, EngineError, GenerateRequest, RolloutConfig, Sampling, make_engine
from penstock.testing import fake_manifest
from penstock.weight_sync import Manifest, WeightsRefused

VOCAB = 64
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Nothing of it is loaded but the size of its vocabulary."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB}))
    return str(tmp_path / "model")


@asynccontextmanager
async def completions(complete: Answer, listed: Any = None) -> AsyncIterator[str]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(listed or {"data": [{"id": "theirs", "max_model_len": 100}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def streamed(request: web.Request, *events: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def choice(ids: list[int] | None, reason: str | None = None, text: str = "x") -> dict[str, Any]:
    found: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
    if ids is not None:
        found |= {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
    return {"choices": [found]}


def engine_at(url: str | None, model: str, folder: Path) -> Any:
    config = RolloutConfig(engine="served", url=url, max_model_len=256, request_timeout_s=20)
    return make_engine(config, model, folder, 0)


async def answer_of(engine: Any, ids: list[int], count: int) -> list[Chunk]:
    sampling = Sampling(max_new_tokens=count, temperature=0.7, stop_token_ids=(9,), seed=3)
    return [chunk async for chunk in engine.generate(GenerateRequest(token_ids=ids, sampling=sampling))]


async def test_a_server_of_completions(model: str, tmp_path: Path) -> None:
    """Ids go in and come out as they are; only the caller's ids end an answer."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await streamed(request, choice([5]), choice([6, 7]), choice([9], "stop"))

    async with completions(complete) as url:
        engine = engine_at(url, model, tmp_path)
        try:
            info = await engine.start()
            assert (info.vocab_size, info.max_model_len, info.version) == (VOCAB, 100, 0)
            chunks = await answer_of(engine, [1, 2, 3], 8)
            assert await engine.healthy()
            with pytest.raises(WeightsRefused, match="keeps its own weights"):
                await engine.load_weights(Manifest.parse(fake_manifest(1)))
        finally:
            await engine.stop()
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 7, 9]
    assert chunks[-1].finish_reason == "stop"
    body = asked[-1]
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("theirs", [1, 2, 3], 8)
    assert (body["temperature"], body["stop_token_ids"], body["ignore_eos"], body["seed"]) == (0.7, [9], True, 3)
    assert body["return_token_ids"] is True


async def test_a_server_without_ids_is_refused(model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        return await streamed(request, choice(None, "length"))

    async with completions(complete) as url:
        engine = engine_at(url, model, tmp_path)
        with pytest.raises(EngineError, match="returns no token ids"):
            await engine.start()
        await engine.stop()


async def test_what_is_no_server_is_named(model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such route"}}, status=404)

    async with completions(complete, {"data": []}) as url:
        engine = engine_at(url, model, tmp_path)
        with pytest.raises(EngineError, match="lists no model"):
            await engine.start()
        await engine.stop()
    engine = engine_at(url, model, tmp_path)
    with pytest.raises(EngineError, match="is the server up"):
        await engine.start()
    assert not await engine.healthy()
    await engine.stop()
    with pytest.raises(EngineError, match=r"rollout\.url is not set"):
        engine_at(None, model, tmp_path)


class Crowd:
    """Answers that stay open: each has sent one token, and ends once `go` is set."""

    def __init__(self) -> None:
        self.open, self.go = 0, asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] == 1:
            return await streamed(request, choice([5], "length"))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {json.dumps(choice([6]))}\n\n".encode())
        self.open += 1
        await self.go.wait()
        await response.write(f"data: {json.dumps(choice([9], 'stop'))}\n\n".encode())
        return response


async def test_health_waits_for_no_answer(model: str, tmp_path: Path) -> None:
    """However many are streamed at a time."""
    crowd = Crowd()
    async with completions(crowd.complete) as url:
        engine = engine_at(url, model, tmp_path)
        try:
            await engine.start()
            answers = [asyncio.create_task(answer_of(engine, [1], 8)) for _ in range(101)]
            while crowd.open < len(answers):
                await asyncio.sleep(0.01)
            assert await engine.healthy()
            crowd.go.set()
            assert all(chunks[-1].finish_reason == "stop" for chunks in await asyncio.gather(*answers))
        finally:
            crowd.go.set()
            await engine.stop()


async def test_a_first_event_with_a_long_prompt(model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        first = choice([5])
        first["choices"][0]["prompt_token_ids"] = [123456] * 100_000
        return await streamed(request, first, choice([9], "stop"))

    async with completions(complete) as url:
        engine = engine_at(url, model, tmp_path)
        try:
            await engine.start()
            chunks = await answer_of(engine, [1], 8)
        finally:
            await engine.stop()
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 9]


@pytest.mark.parametrize("line", [b"data: {no json\n", b'data: {"choices": [7]}\n', b"data: {" + b"x" * (40 << 20)])
async def test_an_event_that_cannot_be_read(line: bytes, model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] == 1:
            return await streamed(request, choice([5], "length"))
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the reader has given up
            await response.write(line)
        return response

    async with completions(complete) as url:
        engine = engine_at(url, model, tmp_path)
        try:
            await engine.start()
            with pytest.raises(EngineError):
                await answer_of(engine, [1], 8)
        finally:
            await engine.stop()


async def test_a_rollout_server_of_ours(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its own route, with the versions that sampled."""
    monkeypatch.setenv("PENSTOCK_SERVED_KEY", TOKEN)
    async with rollout_server(RunQueue(), tmp_path, model=model) as server:
        engine = engine_at(server.url, model, tmp_path)
        try:
            await engine.start()
            chunks = await answer_of(engine, [1, 2, 3], 5)
        finally:
            await engine.stop()
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == fake_answer([1, 2, 3], 5)[: len(ids)]
    assert ids
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    monkeypatch.delenv("PENSTOCK_SERVED_KEY")
    async with rollout_server(RunQueue(), tmp_path, model=model, name="s1") as server:
        engine = engine_at(server.url, model, tmp_path)
        with pytest.raises(EngineError, match="token"):
            await engine.start()
        await engine.stop()
