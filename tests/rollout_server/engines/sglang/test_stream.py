"""How SGLang's events become chunks, against answers in the form that SGLang 0.5.23 sends; no SGLang is needed here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.engines.http.event_server import serving, stream_events

from penstock.rollout_server import Chunk, EngineError, mixture_layers
from penstock.rollout_server.engines.http.stream import RoutedAnswer, refusal
from penstock.rollout_server.engines.sglang.engine import SGLangStream, logprobs_of
from penstock.rollout_server.routed_experts import decode_rows

Event = dict[str, Any]


def event(ids: list[int], version: str = "0", finish: dict[str, Any] | None = None, **meta: Any) -> Event:
    """As captured from the server, shortened to what is read and a few fields that are not."""
    pairs = [[-token / 10, token, None] for token in ids]
    return {
        "output_ids": ids,
        "meta_info": {
            "id": "ab" * 16,
            "finish_reason": finish,
            "prompt_tokens": 3,
            "weight_version": version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": pairs,
            **meta,
        },
    }


def spans(*rows: tuple[str, int, int]) -> dict[str, Any]:
    return {"weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in rows]}


LENGTH = {"type": "length", "length": 4}
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class Server:
    """Answers `/generate` with events and notes what else is asked of it."""

    def __init__(self, events: list[Event], status: int = 200, keep_open: bool = False) -> None:
        self.events = events
        self.status = status
        self.keep_open = keep_open
        self.others: list[tuple[str, Event]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/generate":
            self.others.append((request.path, await request.json()))
            return web.Response()
        if self.status != 200:
            return web.json_response(self.events[0], status=self.status)
        return await stream_events(request, self.events, keep_open=self.keep_open)


@asynccontextmanager
async def answering(server: Server, version: int = 0) -> AsyncIterator[SGLangStream]:
    async with serving(server) as engine:
        stream = SGLangStream(engine, {"rid": "ab" * 16}, version)
        yield stream
        await stream.close()


async def all_chunks(server: Server) -> list[Chunk]:
    async with answering(server) as stream:
        return [chunk async for chunk in stream.chunks(60.0)]


async def test_tokens_logprobs_and_versions_arrive_in_order() -> None:
    last = event([5], "7", LENGTH, **spans(("0", 0, 3), ("7", 3, 5)))
    chunks = await all_chunks(Server([event([1]), event([2, 3]), event([4], "7"), last]))
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5]
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert chunks[-1].finish_reason == "length"
    versions = [version for chunk in chunks for version, start, end in chunk.version_spans for _ in range(start, end)]
    assert versions == [0, 0, 0, 7, 7]


async def test_tokens_of_two_versions_in_one_event_are_told_apart_by_the_spans() -> None:
    (chunk,) = await all_chunks(Server([event([1, 2], "4", LENGTH, **spans(("3", 0, 1), ("4", 1, 2)))]))
    assert chunk.version_spans == [(3, 0, 1), (4, 1, 2)]


async def test_a_version_that_was_handed_on_wrongly_is_an_error_not_a_guess() -> None:
    async with answering(Server([], keep_open=True), version=1) as stream:
        stream._receive([event([1], "1")])
        assert stream._take() is not None
        with pytest.raises(EngineError, match="differ from SGLang's own"):
            stream._receive([event([2], "2", LENGTH, **spans(("2", 0, 2)))])


async def test_a_token_with_the_label_of_a_swap_that_came_before_it_is_handed_on_with_its_own_version() -> None:
    late = [event([1]), event([2], "1"), event([3], "1")]
    last = event([4], "1", LENGTH, **spans(("0", 0, 2), ("1", 2, 4)))
    chunks = await all_chunks(Server([*late, last]))
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4]
    versions = [version for chunk in chunks for version, start, end in chunk.version_spans for _ in range(start, end)]
    assert versions == [0, 0, 1, 1]


async def test_after_a_swap_tokens_wait_for_the_spans_and_empty_chunks_say_that_there_are_some() -> None:
    async with answering(Server([], keep_open=True)) as stream:
        handed_on = []
        for i, label in enumerate(["0", "1", "1"]):
            stream._receive([event([i], label)])
            handed_on.append(stream._take())
        assert stream._take() is not None
        assert [chunk and chunk.token_ids for chunk in handed_on] == [[0], [], []]
        stream._receive([event([3], "1", LENGTH, **spans(("0", 0, 2), ("1", 2, 4)))])
        last = stream._take()
        assert last is not None
        assert (last.token_ids, last.logprobs) == ([1, 2, 3], [-0.1, -0.2, -0.3])
        assert last.version_spans == [(0, 0, 1), (1, 1, 3)]


async def test_an_answer_that_breaks_off_after_a_swap_hands_on_nothing_uncertain() -> None:
    async with answering(Server([event([1]), event([2], "1")])) as stream:
        chunks = stream.chunks(60.0)
        handed_on = (await anext(chunks)).token_ids
        with pytest.raises(EngineError, match="without a finish reason"):
            handed_on += [token async for chunk in chunks for token in chunk.token_ids]
    assert handed_on == [1]


async def test_uncertain_tokens_without_spans_are_an_error() -> None:
    with pytest.raises(EngineError, match="without the versions of its tokens"):
        await all_chunks(Server([event([1]), event([2], "1"), event([], "1", ABORTED)]))


async def test_an_abort_hands_on_the_partial_answer() -> None:
    chunks = await all_chunks(Server([event([1, 2]), event([], "0", ABORTED, **spans(("0", 0, 2)))]))
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2]
    assert chunks[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    ("events", "text", "retryable"),
    [
        ([{"error": {"message": "too long", "code": 400}}], "too long", False),
        ([{"error": {"message": "dead", "code": 500}}], "dead", True),
        ([event([1])], "without a finish reason", True),
        ([event([], "0", ABORTED | {"message": "queue is full", "status_code": 503})], "queue is full", True),
        ([event([], "0", ABORTED | {"message": "too long", "status_code": 400})], "too long", False),
        ([event([1], "0", {"type": "stop", "matched": "NaN happened"})], "NaN happened", True),
        ([event([1], "0", {"type": "tired"})], "'tired'", True),
        ([{"text": "hello"}], "another form than expected", True),
    ],
)
async def test_errors_inside_the_stream(events: list[Event], text: str, retryable: bool) -> None:
    with pytest.raises(EngineError, match=text) as caught:
        await all_chunks(Server(events))
    assert caught.value.retryable == retryable


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(EngineError, match=r"tokens \[1, 9\] with logprobs of \[1, 2\]"):
        logprobs_of(event([1, 2]) | {"output_ids": [1, 9]})


async def test_closing_an_unfinished_answer_aborts_it_by_its_name() -> None:
    server = Server([event([1])], keep_open=True)
    async with answering(server) as stream:
        assert (await anext(stream.chunks(60.0))).token_ids == [1]
    assert server.others == [("/abort_request", {"rid": "ab" * 16})]


async def test_a_finished_answer_is_not_aborted() -> None:
    server = Server([event([1], "0", LENGTH, **spans(("0", 0, 1)))])
    await all_chunks(server)
    assert server.others == []


async def test_a_refusal_carries_sglangs_message() -> None:
    with pytest.raises(EngineError, match="400: top_p must be") as caught:
        await all_chunks(Server([{"error": {"message": "top_p must be in (0, 1]"}}], status=400))
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"success": False, "message": "no weights"}, "400: no weights"),
        ({"error": {"message": "too long"}}, "400: too long"),
        ({"error": "Unauthorized"}, "400: Unauthorized"),
        (["odd"], r'400: \["odd"\]'),
    ],
)
def test_every_form_of_refusal_is_read(body: Any, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        raise refusal("SGLang", 400, json.dumps(body).encode())


TOLD = "AAAAAAAAAAABAAAAAgAAAAMAAAAEAAAAAAAAAAAAAAAFAAAABgAAAAcAAAAAAAAAAAAAAAAAAAABAAAAAgAAAAMAAAAEAAAA"
"""As SGLang sends them: base64 of int32 [tokens - 1, all layers, k] without their shape, rows of dense layers unset."""


@pytest.mark.parametrize("told", [{"routed_experts": TOLD}, {"routed_experts": TOLD[:48]}, {}])
async def test_routed_experts_come_with_the_last_event(told: dict[str, Any]) -> None:
    """Of two tokens after a context of three whose first position has rows already."""
    layers = mixture_layers(
        {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    )
    last = event([2], "0", LENGTH, **spans(("0", 0, 2)), **told)
    async with serving(Server([event([1]), last])) as engine:
        stream = SGLangStream(engine, {"rid": "ab" * 16}, 0, RoutedAnswer(layers, context=3, start=1))
        try:
            if told.get("routed_experts") != TOLD:
                with pytest.raises(EngineError, match="routed experts"):
                    [chunk async for chunk in stream.chunks(60.0)]
                return
            chunks = [chunk async for chunk in stream.chunks(60.0)]
        finally:
            await stream.close()
    assert not any(chunk.routed_experts for chunk in chunks[:-1])
    rows = decode_rows(chunks[-1].routed_experts)
    assert rows is not None
    assert rows.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[1, 2], [3, 4]]]
