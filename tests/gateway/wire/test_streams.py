"""Streams of any answers, summed by hand, against the whole answer; every event is JSON of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.wire.conftest import check_known

from penstock.agent_loops import ChatTokens
from penstock.gateway.prefix_tree import next_key
from penstock.gateway.wire.chat import ChatStream, chat_body, message_of
from penstock.gateway.wire.completions import CompletionStream, completion_body
from penstock.gateway.wire.messages import parse_messages
from penstock.gateway.wire.messages_answers import MessageStream, message_body
from penstock.gateway.wire.reader import AnswerReader, Detokenizer
from penstock.gateway.wire.responses import response_body
from penstock.gateway.wire.responses_stream import ResponseStream
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest

HEAD = AnswerHead("id_1", 1_700_000_000, "tiny", 5, cached_tokens=3)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "日"}}\n</tool_call>'
TEXT = st.lists(
    st.sampled_from([CALL, "<tool_", "STOP", "STO", " ", "\n", "👩", "a\u2028"]) | st.text(max_size=3), max_size=6
)
ANSWERS = st.lists(TEXT.map("".join), min_size=1, max_size=3)
any_answers = given(answers=ANSWERS, size=st.integers(1, 7), told=st.booleans(), cut=st.integers(1, 60))


def events_of(
    stream: Any, readers: list[AnswerReader], left: list[list[int]], size: int, cut: int
) -> tuple[list[Any], list[Choice]]:
    """All events of a stream whose choices take turns; answers of `cut` ids and more end by length."""
    sent, total = [stream.start()], list(map(len, left))
    left = [ids[:cut] for ids in left]
    while any(left):
        for index, reader in enumerate(readers):
            sent.append(stream.feed(index, reader.feed(left[index][:size], [-0.5] * len(left[index][:size]))))
        left = [ids[size:] for ids in left]
    choices = [reader.finish("stop" if count < cut else "length") for reader, count in zip(readers, total, strict=True)]
    sent += [*map(stream.finish, choices), stream.end()]
    return list(parsed(b"".join(sent))), choices


def parsed(sent: bytes) -> Iterator[Any]:
    for block in sent.decode().split("\n\n")[:-1]:
        data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        assert len(data) == 1
        if data != ["[DONE]"]:
            yield json.loads(data[0])


def made(
    detokenizer: Detokenizer, chat: ChatTokens, api: Any, answers: list[str], **fields: Any
) -> tuple[CompletionRequest, list[AnswerReader], list[list[int]]]:
    ask = CompletionRequest(
        api=api, model="tiny", n=len(answers), stream=True, stop=("STOP",), include_usage=True, **fields
    )
    readers = [AnswerReader(ask, HEAD, index, detokenizer) for index in range(ask.n)]
    return ask, readers, [chat.encode(text + "<|im_end|>") for text in answers]


@settings(max_examples=60)
@any_answers
def test_chat(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], answers: list[str], size: int, told: bool, cut: int
) -> None:
    ask, readers, ids = made(detokenizer, chat_for(), "chat", answers, tools=TOOLS, logprobs=told)
    events, choices = events_of(ChatStream(ask, HEAD), readers, ids, size, cut)
    whole = chat_body(ask, HEAD, choices)
    assert events[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"].get("content") or "" for part in parts) == (expected["message"]["content"] or "")
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == expected["message"].get("tool_calls", [])
        tokens = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
        assert tokens == (expected["logprobs"] or {"content": []})["content"]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected["finish_reason"]]


@settings(max_examples=60)
@any_answers
def test_responses(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], answers: list[str], size: int, told: bool, cut: int
) -> None:
    """Items are opened, filled and closed one after the other, and are then those of the whole answer."""
    ask, readers, ids = made(detokenizer, chat_for(), "responses", answers[:1], tools=TOOLS, logprobs=told)
    events, choices = events_of(ResponseStream(ask, HEAD), readers, ids, size, cut)
    whole = response_body(ask, HEAD, choices)
    assert events[-1]["response"] == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    lifecycle = [event["type"].split(".")[-1] for event in events if "output_item" in event["type"]]
    assert lifecycle == ["added", "done"] * len(done)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "".join(item["content"][0]["text"] for item in done if item["type"] == "message")
    told_tokens = [
        one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]
    ]
    assert told_tokens == [one for item in done if item["type"] == "message" for one in item["content"][0]["logprobs"]]


THOUGHTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "hm", " ", "\n", CALL, "STOP", "日"]) | st.text(max_size=2),
    max_size=9,
)


@settings(max_examples=150)
@given(answer=THOUGHTS.map("".join), size=st.integers(1, 7), inside=st.booleans(), cut=st.integers(1, 60))
def test_messages(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], answer: str, size: int, inside: bool, cut: int
) -> None:
    """Blocks are opened, filled and closed one after the other, and are then those of the whole answer."""
    ask, readers, ids = made(detokenizer, chat_for(), "messages", [answer], tools=TOOLS)
    head = replace(HEAD, inside_thinking=inside)
    events, choices = events_of(MessageStream(ask, head), readers, ids, size, cut)
    whole = message_body(ask, head, choices)
    check_known(Message.model_validate(whole))
    assert summed(events) == whole
    sent_back = {"role": "assistant", "content": whole["content"]}
    body = {"model": "tiny", "max_tokens": 1, "messages": [sent_back, {"role": "user", "content": "x"}]}
    (message, _) = parse_messages(body).messages
    assert next_key("", message) == next_key("", message_of(choices[0]))


def summed(events: list[Any]) -> Any:
    """The message that a client puts together."""
    first, *blocks, delta, stop = events
    assert [first["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    content: list[Any] = []
    for event in blocks:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            content.append(dict(event["content_block"]))
        assert event["index"] == len(content) - 1
        if kind == "delta":
            ((field, piece),) = ((name, one) for name, one in event["delta"].items() if name != "type")
            assert piece
            assert event["delta"]["type"] == ("input_json_delta" if field == "partial_json" else f"{field}_delta")
            if field == "partial_json":
                content[-1]["input"] = json.loads(piece)
            else:
                content[-1][field] += piece
    order = [event["type"].removeprefix("content_block_") for event in blocks if not event["type"].endswith("delta")]
    assert order == ["start", "stop"] * len(content)
    return {**first["message"], "content": content, **delta["delta"], "usage": delta["usage"]}


@settings(max_examples=60)
@any_answers
def test_completions(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], answers: list[str], size: int, told: bool, cut: int
) -> None:
    ask, readers, ids = made(detokenizer, chat_for(), "completions", answers, logprobs=told)
    events, choices = events_of(CompletionStream(ask, HEAD), readers, ids, size, cut)
    whole = completion_body(ask, HEAD, choices)
    for expected in whole["choices"]:
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            told_values = [one for part in parts if part["logprobs"] for one in part["logprobs"][name]]
            assert told_values == (expected["logprobs"] or {name: []})[name]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [expected["finish_reason"]]
