"""How events of vLLM and SGLang become chunks, against answers made by hand; neither is needed here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.engines.http.event_server import Spans, serving, sglang_event, vllm_event

from penstock.rollout_server import Chunk, EngineError, mixture_layers
from penstock.rollout_server.engines.http.stream import AnswerStream, RoutedAnswer, refusal
from penstock.rollout_server.engines.sglang.engine import SGLangStream, logprobs_of
from penstock.rollout_server.engines.vllm.engine import VLLMStream
from penstock.rollout_server.protocol import VersionsDisproved
from penstock.rollout_server.routed_experts import decode_rows

COALESCE = "penstock.rollout_server.engines.http.stream.COALESCE_S"
both = pytest.mark.parametrize("engine", ["vllm", "sglang"])
RID = "ab" * 16


class Fed:
    """A stream whose server says nothing by itself: what it receives is given by hand."""

    def __init__(self, engine: str, stream: AnswerStream, aborts: list[Any]) -> None:
        self.engine, self.stream, self.aborts = engine, stream, aborts
        stream.begins(200)

    def event(self, ids: list[int], finish: str | None = None, spans: Spans | None = None, version: int = 0) -> Any:
        """vLLM's has the version that the stream is labelled with when it comes."""
        if self.engine == "sglang":
            return sglang_event(ids, finish, spans, version)
        self.stream.relabel(version)
        return vllm_event(ids, finish, spans)

    def send(self, *events: Any) -> Fed:
        for event in events:
            self.stream.receives(f"data: {json.dumps(event)}\n\n".encode())
        return self

    async def rest(self, received: list[int] | None = None) -> list[Chunk]:
        """Chunks to the end; `received` has their tokens also where an error ends them."""
        chunks = []
        async for chunk in self.stream.chunks(60.0):
            chunks.append(chunk)
            if received is not None:
                received += chunk.token_ids
        return chunks

    async def over(self) -> list[Chunk]:
        self.stream.ends("")
        return await self.rest()


@asynccontextmanager
async def fed(engine: str, version: int = 0, routed: RoutedAnswer | None = None) -> AsyncIterator[Fed]:
    aborts: list[Any] = []

    async def silent(request: web.Request) -> web.StreamResponse:
        if request.path == "/abort_request":
            aborts.append(await request.json())
            return web.Response()
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(silent) as client:
        kind = VLLMStream if engine == "vllm" else SGLangStream
        stream = kind(client, {"rid": RID}, version, routed)
        yield Fed(engine, stream, aborts)
        await stream.close()


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def versions_of(chunks: list[Chunk]) -> list[int]:
    return [version for chunk in chunks for version, start, end in chunk.version_spans for _ in range(start, end)]


@both
async def test_tokens_logprobs_and_versions_arrive_in_order(engine: str) -> None:
    async with fed(engine) as one:
        one.send(one.event([1])).send(one.event([2, 3])).send(one.event([4], version=7))
        chunks = await one.send(one.event([5], "stop", [(0, 0, 3), (7, 3, 5)], version=7)).over()
    assert tokens_of(chunks) == [1, 2, 3, 4, 5]
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert chunks[-1].finish_reason == "stop"
    assert versions_of(chunks) == [0, 0, 0, 7, 7]


async def test_tokens_have_the_version_of_the_moment_at_which_they_came() -> None:
    """They are parsed together after the version has changed, and no spans correct their labels."""
    async with fed("vllm") as one:
        one.send(one.event([1]), one.event([2])).send(one.event([3], version=7), one.event([4], "stop", version=7))
        assert versions_of(await one.over()) == [0, 0, 7, 7]


@both
async def test_the_servers_spans_are_believed_for_tokens_not_handed_on_yet(engine: str) -> None:
    async with fed(engine, 3) as one:
        (chunk,) = await one.send(one.event([1, 2], "length", [(3, 0, 1), (4, 1, 2)], version=4)).over()
    assert chunk.version_spans == [(3, 0, 1), (4, 1, 2)]


@both
async def test_version_that_was_handed_on_wrongly_is_an_error_not_a_guess(engine: str) -> None:
    async with fed(engine, 1) as one:
        chunks = one.send(one.event([1], version=1)).stream.chunks(60.0)
        assert (await anext(chunks)).token_ids == [1]
        one.send(one.event([2], version=1), one.event([3], "stop", [(0, 0, 1), (1, 1, 3)], version=1))
        with pytest.raises(VersionsDisproved, match="own"):
            await anext(chunks)


@both
async def test_event_that_comes_in_parts_is_put_together(engine: str) -> None:
    async with fed(engine) as one:
        events = (one.event([1]), one.event([2], "length", [(0, 0, 2)]))
        for byte in b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events):
            one.stream.receives(bytes([byte]))
        (chunk,) = await one.over()
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ([1, 2], [-0.1, -0.2], "length")


@both
async def test_what_comes_before_a_break_or_an_unreadable_event_is_handed_on_before_the_error(engine: str) -> None:
    for last in (b"", b"data: {half\n\n", b'data: {"other": 1}\n\n'):
        received: list[int] = []
        async with fed(engine) as one:
            one.send(one.event([1]), one.event([2])).stream.receives(last)
            one.stream.ends("gone")
            with pytest.raises(EngineError, match=r"form|broke off") as caught:
                await one.rest(received)
        assert received == [1, 2]
        assert caught.value.retryable


@both
async def test_stopped_server_ends_what_is_being_read(engine: str) -> None:
    async with fed(engine) as one:
        chunks = one.send(one.event([1])).stream.chunks(30.0)
        assert (await anext(chunks)).token_ids == [1]
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        one.stream.break_off("the server is being stopped")
        with pytest.raises(EngineError, match="being stopped") as caught:
            await asyncio.wait_for(waiting, 60)
        assert caught.value.retryable


ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
FULL, LONG = ABORTED | {"message": "full", "status_code": 503}, ABORTED | {"message": "long", "status_code": 400}


@pytest.mark.parametrize(
    ("engine", "events", "text", "retryable"),
    [
        *((name, [{"error": {"message": "too long", "code": 400}}], "too long", False) for name in ("vllm", "sglang")),
        *((name, [{"error": {"message": "dead", "code": 500}}], "dead", True) for name in ("vllm", "sglang")),
        ("vllm", [vllm_event([1])], "without a finish reason", True),
        ("vllm", [vllm_event([1], "error")], "ended the answer with 'error'", True),
        ("vllm", [vllm_event([1], logprobs={"content": []})], r"1 tokens|another form", True),
        ("sglang", [sglang_event([1])], "without a finish reason", True),
        ("sglang", [sglang_event([], FULL)], "full", True),
        ("sglang", [sglang_event([], LONG)], "long", False),
        ("sglang", [sglang_event([1], {"type": "stop", "matched": "NaN happened"})], "NaN happened", True),
        ("sglang", [sglang_event([1], "tired")], "'tired'", True),
        (
            "sglang",
            [sglang_event([1]), sglang_event([2], version=1), sglang_event([], ABORTED, version=1)],
            "ver",
            True,
        ),
    ],
)
async def test_error_inside_the_stream_is_raised(engine: str, events: list[Any], text: str, retryable: bool) -> None:
    async with fed(engine) as one:
        with pytest.raises(EngineError, match=text) as caught:
            await one.send(*events).over()
    assert caught.value.retryable == retryable


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"success": False, "message": "no weights"}, "400: no weights"),
        ({"error": {"message": "too long"}}, "400: too long"),
        ({"error": "Unauthorized"}, "400: Unauthorized"),
        (["odd"], r'400: \["odd"\]'),
    ],
)
async def test_every_form_of_refusal_is_read(body: Any, text: str) -> None:
    async with fed("vllm") as one:
        one.stream.begins(400)
        one.stream.receives(json.dumps(body).encode())
        with pytest.raises(EngineError, match=text) as caught:
            await one.over()
    assert not caught.value.retryable
    assert refusal("vLLM", 500, b"").retryable


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(EngineError, match=r"tokens \[1, 9\] with logprobs of \[1, 2\]"):
        logprobs_of(sglang_event([1, 2]) | {"output_ids": [1, 9]})


# when tokens are handed on -------------------------------------------------------------------------------------------
async def test_after_the_first_tokens_what_arrives_together_travels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COALESCE, 3600.0)
    async with fed("vllm") as one:
        chunks = one.send(one.event([1])).stream.chunks(30.0)
        assert (await anext(chunks)).token_ids == [1]
        one.send(one.event([2]), one.event([3]), one.event([4], "length", [(0, 0, 4)]))
        one.stream.ends("")
        assert [chunk.token_ids async for chunk in chunks] == [[2, 3, 4]]


async def test_first_tokens_of_a_whole_answer_travel_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COALESCE, 3600.0)
    async with fed("vllm") as one:
        one.stream.hold_first()
        chunks = asyncio.ensure_future(one.rest())
        for event in (one.event([1]), one.event([2]), one.event([3], "length", [(0, 0, 3)])):
            one.send(event)
            await asyncio.sleep(0.01)
        assert not chunks.done()
        one.stream.ends("")
        assert [chunk.token_ids for chunk in await chunks] == [[1, 2, 3]]


async def test_tokens_are_not_held_back_for_longer_while_the_engine_is_silent() -> None:
    async with fed("vllm") as one:
        chunks = one.send(one.event([1])).stream.chunks(30.0)
        assert (await anext(chunks)).token_ids == [1]
        one.send(one.event([2]))
        assert (await anext(chunks)).token_ids == [2]


async def test_answer_whose_close_is_cancelled_leaves_nothing_open() -> None:
    """While it waits for the end of the stream of a complete answer."""
    async with fed("vllm") as one:
        await one.send(one.event([1], "length")).rest()
        closing = asyncio.create_task(one.stream.close())
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
        await asyncio.wait({closing})
        assert one.stream._exchange.reply is None
        assert one.stream._timer is None or one.stream._timer.cancelled()


# SGLang: tokens with a newer label wait for the spans ----------------------------------------------------------------
async def test_token_with_the_label_of_a_swap_that_came_before_it_has_its_own_version() -> None:
    async with fed("sglang") as one:
        one.send(one.event([1]), one.event([2], version=1), one.event([3], version=1))
        chunks = await one.send(one.event([4], "length", [(0, 0, 2), (1, 2, 4)], version=1)).over()
    assert tokens_of(chunks) == [1, 2, 3, 4]
    assert versions_of(chunks) == [0, 0, 1, 1]


async def test_after_a_swap_empty_chunks_show_that_tokens_came() -> None:
    async with fed("sglang") as one:
        handed_on = []
        for i, label in enumerate([0, 1, 1]):
            one.stream._receive([one.event([i], version=label)])
            handed_on.append(one.stream._take())
        assert [chunk and chunk.token_ids for chunk in handed_on] == [[0], [], []]
        one.stream._receive([one.event([3], "length", [(0, 0, 2), (1, 2, 4)], version=1)])
        last = one.stream._take()
        assert last is not None
        assert (last.token_ids, last.logprobs) == ([1, 2, 3], [-0.1, -0.2, -0.3])
        assert last.version_spans == [(0, 0, 1), (1, 1, 3)]


async def test_answer_that_breaks_off_after_a_swap_hands_on_nothing_uncertain() -> None:
    received: list[int] = []
    async with fed("sglang") as one:
        one.send(one.event([1]), one.event([2], version=1)).stream.ends("")
        with pytest.raises(EngineError, match="without a finish reason"):
            await one.rest(received)
    assert received == [1]


async def test_abort_hands_on_the_partial_answer() -> None:
    async with fed("sglang") as one:
        chunks = await one.send(one.event([1, 2]), sglang_event([], ABORTED, [(0, 0, 2)])).over()
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([1, 2], "abort")


@pytest.mark.parametrize("finished", [False, True])
async def test_closing_aborts_an_answer_that_is_not_finished_by_its_name(finished: bool) -> None:
    async with fed("sglang") as one:
        one.send(one.event([1], "length" if finished else None, [(0, 0, 1)] if finished else None))
        assert (await anext(one.stream.chunks(60.0))).token_ids == [1]
        if finished:
            one.stream.ends("")
    assert one.aborts == ([] if finished else [{"rid": RID}])


# routed experts ------------------------------------------------------------------------------------------------------
LAYERS = mixture_layers({"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]})
TOLD = {
    "vllm": (
        "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDMsIDIpLCB9ICAg"
        "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAECAwQAAAUGBwAAAAECAwQ="
    ),
    "sglang": "AAAAAAAAAAABAAAAAgAAAAMAAAAEAAAAAAAAAAAAAAAFAAAABgAAAAcAAAAAAAAAAAAAAAAAAAABAAAAAgAAAAMAAAAEAAAA",
}
"""Base64 of [prompt + completion - 1, all layers, k], rows of dense layers unset: of a .npy as vLLM 0.33 sends it, of
int32 as SGLang does."""


async def routed(engine: str, finish: str, told: str | None) -> list[Chunk]:
    """An answer of two tokens to a context of three whose first position has rows already."""
    make = vllm_event if engine == "vllm" else sglang_event
    more = {} if told is None else {"routed_experts": told}
    async with fed(engine, routed=RoutedAnswer(LAYERS, context=3, start=1)) as one:
        return await one.send(one.event([1]), make([2], finish, [(0, 0, 2)], **more)).over()


@both
async def test_routed_experts_come_with_the_last_event(engine: str) -> None:
    chunks = await routed(engine, "stop", TOLD[engine])
    assert not any(chunk.routed_experts for chunk in chunks[:-1])
    rows = decode_rows(chunks[-1].routed_experts)
    assert rows is not None
    assert rows.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[1, 2], [3, 4]]]
    for wrong in (None, "AAAA", TOLD[engine][:48]):
        with pytest.raises(EngineError, match="routed") as refused:
            await routed(engine, "stop", wrong)
        assert not refused.value.retryable
    assert (await routed(engine, "abort", None))[-1].finish_reason == "abort"
