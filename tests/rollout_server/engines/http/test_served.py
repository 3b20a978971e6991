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
from tests.until import until

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
async def completions(complete: Answer, listed: Any = None, generate: Answer | None = None) -> AsyncIterator[str]:
    """`generate`: the route of a rollout server of ours."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response(listed or {"data": [{"id": "theirs", "max_model_len": 100}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    if generate is not None:
        app.add_routes([web.post("/generate", generate)])
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
    config = RolloutConfig(engine="served", url=url, max_model_len=256, request_timeout_s=200)
    return make_engine(config, model, folder, 0)


@asynccontextmanager
async def started(url: str, model: str, folder: Path) -> AsyncIterator[Any]:
    engine = engine_at(url, model, folder)
    try:
        engine.info = await engine.start()
        yield engine
    finally:
        await engine.stop()


def probe_or(complete: Answer) -> Answer:
    """`complete` for all requests but that of the start, which gets a token."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if (await request.json())["max_tokens"] == 1:
            return await streamed(request, choice([5], "length"))
        return await complete(request)

    return answer


async def answer_of(engine: Any, ids: list[int], count: int) -> list[Chunk]:
    sampling = Sampling(max_new_tokens=count, temperature=0.7, stop_token_ids=(9,), seed=3)
    return [chunk async for chunk in engine.generate(GenerateRequest(token_ids=ids, sampling=sampling))]


async def test_a_server_of_completions(model: str, tmp_path: Path) -> None:
    """Ids go in and come out as they are; only the caller's ids end an answer."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await streamed(request, choice([5]), choice([6, 7]), choice([9], "stop"))

    async with completions(complete) as url, started(url, model, tmp_path) as engine:
        assert (engine.info.vocab_size, engine.info.max_model_len, engine.info.version) == (VOCAB, 100, 0)
        chunks = await answer_of(engine, [1, 2, 3], 8)
        assert await engine.healthy()
        with pytest.raises(WeightsRefused, match="keeps its own weights"):
            await engine.load_weights(Manifest.parse(fake_manifest(1)))
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 7, 9]
    assert chunks[-1].finish_reason == "stop"
    body = asked[-1]
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("theirs", [1, 2, 3], 8)
    assert (body["temperature"], body["stop_token_ids"], body["ignore_eos"], body["seed"]) == (0.7, [9], True, 3)
    assert body["return_token_ids"] is True


async def test_server_that_cannot_be_used_is_named(model: str, tmp_path: Path) -> None:
    async def without_ids(request: web.Request) -> web.StreamResponse:
        return await streamed(request, choice(None, "length"))

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such route"}}, status=404)

    for complete, listed, cause in ((without_ids, None, "returns no token ids"), (refuse, {"data": []}, "no model")):
        async with completions(complete, listed) as url:
            with pytest.raises(EngineError, match=cause):
                await started(url, model, tmp_path).__aenter__()
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
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"data: {json.dumps(choice([6]))}\n\n".encode())
        self.open += 1
        await self.go.wait()
        await response.write(f"data: {json.dumps(choice([9], 'stop'))}\n\n".encode())
        return response


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (b'{"error": {"field": "deadline_s", "message": "the answer was not whole in 3 s"}}', "not whole in 3 s"),
        (b'{"token_ids": "none"}', "another form than expected"),
        (b"[1, 2]", "another form than expected"),
        (b'{"token_ids": [5], "logpr', "another form than expected"),
    ],
)
async def test_an_answer_that_a_rollout_server_breaks_off_is_told_with_its_cause(
    model: str, tmp_path: Path, last: bytes, cause: str
) -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        whole = (await request.json())["sampling"]["max_new_tokens"] == 1
        first = Chunk(
            token_ids=[5], logprobs=[-0.5], version_spans=[(0, 0, 1)], finish_reason="length" if whole else None
        )
        await response.write(first.model_dump_json().encode() + b"\n" + (b"" if whole else last + b"\n"))
        return response

    listed = {"data": [{"id": "ours", "owned_by": "penstock", "max_model_len": 100}]}
    async with completions(probe_or(generate), listed, generate) as url, started(url, model, tmp_path) as engine:
        with pytest.raises(EngineError, match=cause):
            await answer_of(engine, [1], 8)


async def test_health_waits_for_no_answer(model: str, tmp_path: Path) -> None:
    """However many are streamed at a time."""
    crowd = Crowd()
    async with completions(probe_or(crowd.complete)) as url, started(url, model, tmp_path) as engine:
        answers = [asyncio.create_task(answer_of(engine, [1], 8)) for _ in range(101)]
        try:
            await until(lambda: crowd.open == len(answers))
            assert await engine.healthy()
        finally:
            crowd.go.set()
        assert all(chunks[-1].finish_reason == "stop" for chunks in await asyncio.gather(*answers))


async def test_a_first_event_with_a_long_prompt(model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        first = choice([5])
        first["choices"][0]["prompt_token_ids"] = [123456] * 100_000
        return await streamed(request, first, choice([9], "stop"))

    async with completions(complete) as url, started(url, model, tmp_path) as engine:
        chunks = await answer_of(engine, [1], 8)
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 9]


@pytest.mark.parametrize(
    "line",
    [b"data: {no json\n", b'data: {"choices": [7]}\n', b"data: {" + b"x" * (40 << 20)],
    ids=["no JSON", "another form", "too long"],
)
async def test_an_event_that_cannot_be_read(line: bytes, model: str, tmp_path: Path) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the reader has given up
            await response.write(line)
        return response

    async with completions(probe_or(complete)) as url, started(url, model, tmp_path) as engine:
        with pytest.raises(EngineError):
            await answer_of(engine, [1], 8)


async def test_rollout_server_of_ours_is_asked_over_its_own_route(
    queue: RunQueue, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVED_KEY", TOKEN)
    async with rollout_server(queue, tmp_path, model=model) as server:
        async with started(server.url, model, tmp_path) as engine:
            chunks = await answer_of(engine, [1, 2, 3], 5)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids
        assert ids == fake_answer([1, 2, 3], 5)[: len(ids)]
        assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
        monkeypatch.delenv("PENSTOCK_SERVED_KEY")
        with pytest.raises(EngineError, match="token"):
            await started(server.url, model, tmp_path).__aenter__()
