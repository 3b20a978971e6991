"""How vLLM's events become chunks, against answers made by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.engines.http.event_server import serving, stream_events

from penstock.rollout_server import Chunk, EngineError, mixture_layers
from penstock.rollout_server.engines.http.stream import RoutedAnswer
from penstock.rollout_server.engines.vllm.engine import VLLMStream
from penstock.rollout_server.routed_experts import decode_rows


def event(
    ids: list[int], finish: str | None = None, versions: list[tuple[str, int, int]] | None = None
) -> dict[str, Any]:
    spans = versions and [{"version": label, "start": start, "end": end} for label, start, end in versions]
    content = [{"token_id": token, "logprob": -token / 10} for token in ids]
    return {
        "choices": [
            {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish, "weight_versions": spans}
        ]
    }


@asynccontextmanager
async def answering(events: Iterator[dict[str, Any]], version: int) -> AsyncIterator[VLLMStream]:
    async with serving(lambda request: stream_events(request, events)) as engine:
        stream = VLLMStream(engine, {}, version)
        yield stream
        await stream.close()


@asynccontextmanager
async def silent() -> AsyncIterator[VLLMStream]:
    """Of a server that says nothing: what comes is given by hand."""

    async def nothing(_request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(nothing) as engine:
        stream = VLLMStream(engine, {}, 0)
        yield stream
        await stream.close()


def bytes_of(line: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(line)}\n\n".encode()


def versions_of(chunks: list[Chunk]) -> list[int]:
    """Of every token."""
    return [version for chunk in chunks for version, start, end in chunk.version_spans for _ in range(start, end)]


async def all_chunks(stream: VLLMStream) -> list[Chunk]:
    return [chunk async for chunk in stream.chunks(60.0)]


async def collect(stream: VLLMStream, received: list[int]) -> None:
    async for chunk in stream.chunks(60.0):
        received += chunk.token_ids


async def test_tokens_logprobs_and_versions_arrive_in_order() -> None:
    streams: list[VLLMStream] = []

    def events() -> Iterator[dict[str, Any]]:
        yield event([1])
        yield event([2, 3])
        streams[0].relabel(7)
        yield event([4])
        yield event([5], "stop", [("default", 0, 3), ("7", 3, 5)])

    async with answering(events(), 0) as stream:
        streams.append(stream)
        chunks = await all_chunks(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5]
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert chunks[-1].finish_reason == "stop"
    assert versions_of(chunks) == [0, 0, 0, 7, 7]


async def test_tokens_have_the_version_of_the_moment_at_which_they_came() -> None:
    """Taken apart together, after the version has changed; this server reports no spans that could correct labels."""
    async with silent() as stream:
        stream.begins(200)
        for line in (event([1]), event([2])):
            stream.receives(bytes_of(line))
        stream.relabel(7)
        stream.receives(bytes_of(event([3])))
        stream.receives(bytes_of(event([4], "stop")))
        stream.ends("")
        chunks = await all_chunks(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4]
    assert versions_of(chunks) == [0, 0, 7, 7]


async def test_events_that_come_in_parts_are_put_together() -> None:
    async with silent() as stream:
        stream.begins(200)
        for byte in bytes_of(event([1])) + bytes_of(event([2], "length", [("0", 0, 2)])):
            stream.receives(bytes([byte]))
        stream.ends("")
        (chunk,) = await all_chunks(stream)
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ([1, 2], [-0.1, -0.2], "length")


async def test_what_comes_before_an_event_that_cannot_be_read_is_handed_on_before_the_error() -> None:
    broken = event([3])
    broken["choices"][0]["logprobs"]["content"].clear()
    for last in (bytes_of(broken), b"data: {half\n\n", b'data: {"other": 1}\n\n'):
        received: list[int] = []
        async with silent() as stream:
            stream.begins(200)
            stream.receives(bytes_of(event([1])) + bytes_of(event([2])) + last)
            with pytest.raises(EngineError):
                await collect(stream, received)
        assert received == [1, 2]


async def test_vllms_own_spans_are_believed_for_tokens_not_handed_on_yet() -> None:
    async with answering(iter([event([1, 2], "length", [("3", 0, 1), ("4", 1, 2)])]), 3) as stream:
        (chunk,) = await all_chunks(stream)
    assert chunk.version_spans == [(3, 0, 1), (4, 1, 2)]


async def test_disproved_tokens_are_not_handed_on() -> None:
    received: list[int] = []
    events = iter([event([1]), event([2]), event([3], "stop", [("0", 0, 1), ("1", 1, 3)])])
    async with answering(events, 1) as stream:
        with pytest.raises(EngineError, match="differ from vLLM's own"):
            await collect(stream, received)
    assert received == [1]


async def test_a_version_that_was_handed_on_wrongly_is_an_error_not_a_guess() -> None:
    async with answering(iter([]), 1) as stream:
        stream._receive([event([1])])
        assert stream._take() is not None
        with pytest.raises(EngineError, match="differ from vLLM's own"):
            stream._receive([event([], "stop", [("2", 0, 1)])])


async def test_what_arrived_before_a_break_is_handed_on_before_the_error() -> None:
    def events() -> Iterator[dict[str, Any]]:
        yield event([1, 2])
        raise ConnectionError("gone")

    received: list[int] = []
    async with answering(events(), 0) as stream:
        with pytest.raises(EngineError, match="broke off") as caught:
            await collect(stream, received)
    assert received == [1, 2]
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("events", "text", "retryable"),
    [
        ([{"error": {"message": "too long", "code": 400}}], "too long", False),
        ([{"error": {"message": "dead", "code": 500}}], "dead", True),
        ([event([1])], "without a finish reason", True),
        ([event([1], "error")], "ended the answer with 'error'", True),
    ],
)
async def test_errors_inside_the_stream(events: list[dict[str, Any]], text: str, retryable: bool) -> None:
    async with answering(iter(events), 0) as stream:
        with pytest.raises(EngineError, match=text) as caught:
            await all_chunks(stream)
    assert caught.value.retryable == retryable


async def test_an_answer_whose_close_is_cancelled_leaves_nothing_open() -> None:
    """While it waits for the end of the stream of a complete answer."""
    async with serving(lambda request: stream_events(request, [event([1], "length")], keep_open=True)) as engine:
        stream = VLLMStream(engine, {}, 0)
        await all_chunks(stream)
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
        await asyncio.wait({closing})
        assert stream._exchange.reply is None
        assert stream._timer is None or stream._timer.cancelled()


async def test_a_refusal_carries_vllms_message() -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "temperature must be in [0, 2]"}}, status=400)

    async with serving(refuse) as engine:
        stream = VLLMStream(engine, {}, 0)
        with pytest.raises(EngineError, match="temperature must be") as caught:
            await all_chunks(stream)
        await stream.close()
    assert not caught.value.retryable


async def test_after_the_first_tokens_what_arrives_together_travels_together() -> None:
    """Nine events within a fraction of `COALESCE_S`: the first at once, the rest in one chunk with the end."""
    events = [event([1]), *(event([token]) for token in range(2, 9)), event([9], "length", [("0", 0, 9)])]
    async with answering(iter(events), 0) as stream:
        chunks = await all_chunks(stream)
    assert chunks[0].token_ids == [1]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(1, 10))
    assert len(chunks) <= 3


async def test_the_first_tokens_of_a_whole_answer_travel_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout_server.engines.http.stream.COALESCE_S", 3600.0)
    async with silent() as stream:
        stream.hold_first()
        stream.begins(200)
        chunks = asyncio.ensure_future(all_chunks(stream))
        for line in (event([1]), event([2]), event([3], "length", [("0", 0, 3)])):
            stream.receives(bytes_of(line))
            await asyncio.sleep(0.01)
        assert not chunks.done()
        stream.ends("")
        assert [chunk.token_ids for chunk in await chunks] == [[1, 2, 3]]


async def test_tokens_are_not_held_back_for_longer_while_the_engine_is_silent() -> None:
    """A pause after the second event: it does not wait for the third."""
    go_on = asyncio.Event()

    async def pausing(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for token in (1, 2):
            await response.write(f"data: {json.dumps(event([token]))}\n\n".encode())
            await asyncio.sleep(0.01)
        await go_on.wait()
        await response.write(f"data: {json.dumps(event([3], 'length'))}\n\n".encode())
        return response

    async with serving(pausing) as engine:
        stream = VLLMStream(engine, {}, 0)
        chunks = stream.chunks(30.0)
        assert (await anext(chunks)).token_ids == [1]
        assert (await anext(chunks)).token_ids == [2]
        go_on.set()
        assert (await anext(chunks)).token_ids == [3]
        await stream.close()


async def test_what_is_being_read_when_the_server_is_stopped_ends_with_what_arrived() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        return await stream_events(request, [event([1])], keep_open=True)

    async with serving(endless) as engine:
        stream = VLLMStream(engine, {}, 0)
        chunks = stream.chunks(30.0)
        assert (await anext(chunks)).token_ids == [1]
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        stream.break_off("the server is being stopped")
        await engine.close()
        with pytest.raises(EngineError, match="being stopped") as caught:
            await asyncio.wait_for(waiting, 60)
        assert caught.value.retryable
        await stream.close()


LAYERS = mixture_layers({"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]})
TOLD = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDMsIDIpLCB9ICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAAECAwQAAAUGBwAAAAECAwQ="
)
"""As vLLM 0.33 sends them: base64 of a .npy, [prompt + completion - 1, all layers, k], rows of dense layers unset."""


async def routed(last: dict[str, Any]) -> list[Chunk]:
    """Of an answer of two tokens to a context of three whose first position has rows already."""
    async with serving(lambda request: stream_events(request, iter([event([1]), last]))) as engine:
        stream = VLLMStream(engine, {}, 0, RoutedAnswer(LAYERS, context=3, start=1))
        try:
            return await all_chunks(stream)
        finally:
            await stream.close()


def finished(**told: Any) -> dict[str, Any]:
    last = event([2], "stop", [("default", 0, 2)])
    last["choices"][0] |= told
    return last


async def test_routed_experts_come_with_the_last_event() -> None:
    chunks = await routed(finished(routed_experts=TOLD))
    assert [chunk.routed_experts for chunk in chunks[:-1]] == [[]] * (len(chunks) - 1)
    rows = decode_rows(chunks[-1].routed_experts)
    assert rows is not None
    assert rows.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[1, 2], [3, 4]]]


@pytest.mark.parametrize("told", [{}, {"routed_experts": None}, {"routed_experts": "AAAA"}])
async def test_an_answer_without_its_routed_experts_is_an_error(told: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="routed") as refused:
        await routed(finished(**told))
    assert not refused.value.retryable


async def test_an_aborted_answer_needs_no_routed_experts() -> None:
    last = finished()
    last["choices"][0]["finish_reason"] = "abort"
    assert (await routed(last))[-1].finish_reason == "abort"
