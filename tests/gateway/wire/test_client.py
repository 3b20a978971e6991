"""The real `openai` client: what it puts together from a stream is what it gets whole, and both are its own types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.gateway.wire.chat import ChatStream, message_of, parse_chat
from penstock.gateway.wire.completions import CompletionStream
from penstock.gateway.wire.responses import parse_response
from penstock.gateway.wire.responses_stream import ResponseStream

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": ADD}]
ANSWERS = {
    "text": "日本 👩‍👩‍👧 yes\n",
    "thinking": "<think>\nhm\n</think>\n\nyes",
    "empty": "",
    "one call": CALL,
    "text and two calls": f"Let me see.\n{CALL}\n{CALL}",
    "broken call": '<tool_call>\n{"name": "add"\n</tool_call>',
    "half a stop string": "a STO",
    "stop string": "a STOP b",
}
whole_answers = pytest.mark.parametrize("text", ANSWERS.values(), ids=list(ANSWERS))
chunk_sizes = pytest.mark.parametrize("chunk_ids", [1, 5])


async def chat_both_ways(client: AsyncOpenAI, **more: Any) -> tuple[ChatCompletion, ChatCompletion, list[Any]]:
    messages: Any = [{"role": "user", "content": "x"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, **more)
    options = {"stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(model="tiny", messages=messages, **options, **more) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        summed = await stream.get_final_completion()
    return whole, summed, chunks


@whole_answers
@chunk_sizes
async def test_chat(scripted: Callable[..., Any], text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    whole, summed, chunks = await chat_both_ways(server.client(), tools=TOOLS, stop=["STOP"], logprobs=True)
    ChatCompletion.model_validate(whole.model_dump(mode="json"), strict=False)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(mode="json"))
    assert comparable(summed) == comparable(whole)
    assert whole.usage == summed.usage
    ((choice,), _) = server.choices
    assert whole.choices[0].message.content == (choice.content or None if choice.calls else choice.content)
    assert token_bytes(whole) == b"".join(one.raw for one in choice.tokens)


def token_bytes(answer: ChatCompletion) -> bytes:
    logprobs = answer.choices[0].logprobs
    assert logprobs
    return b"".join(bytes(one.bytes or []) for one in logprobs.content or [])


def comparable(answer: ChatCompletion) -> Any:
    """Without ids of the answer and of calls, which are its; the stream's parser writes no content as None."""
    found = json.loads(answer.model_dump_json())
    for choice in found["choices"]:
        choice["message"]["content"] = choice["message"]["content"] or ""
        choice["message"]["tool_calls"] = choice["message"]["tool_calls"] or []
        for call in choice["message"]["tool_calls"]:
            assert call.pop("id").startswith("call_")
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"].pop("parsed", None)
        for one in choice["logprobs"]["content"] if choice["logprobs"] else []:
            assert one.pop("logprob") < 0
    return [
        (choice["index"], choice["finish_reason"], choice["logprobs"], choice["message"]) for choice in found["choices"]
    ]


async def test_chat_with_several_choices(scripted: Callable[..., Any]) -> None:
    server = scripted("日本<|im_end|>", f"Hm. {CALL}<|im_end|>", "third, longer than the others<|im_end|>")
    whole, summed, _ = await chat_both_ways(server.client(), tools=TOOLS, n=3)
    assert comparable(summed) == comparable(whole)
    assert [choice.message.content for choice in whole.choices] == ["日本", "Hm.", "third, longer than the others"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "tool_calls", "stop"]
    assert whole.usage
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in server.choices[0])


async def test_chat_cut_by_length(scripted: Callable[..., Any]) -> None:
    server = scripted(f"Let me see.\n{CALL}<|im_end|>", limit_ids=20)
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    whole = await server.client().chat.completions.create(**asked)
    chunks = [one async for one in await server.client().chat.completions.create(stream=True, **asked)]
    (choice,) = whole.choices
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert not choice.message.tool_calls
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


@whole_answers
@pytest.mark.parametrize("dump", [{"exclude_none": True}, {"exclude_unset": True}, {}], ids=str)
async def test_a_chat_answer_sent_back_is_the_message_it_was(
    scripted: Callable[..., Any], text: str, dump: dict[str, Any]
) -> None:
    server = scripted(text + "<|im_end|>")
    whole, _, _ = await chat_both_ways(server.client(), tools=TOOLS)
    sent_back = whole.choices[0].message.model_dump(**dump)
    ask = parse_chat({"model": "tiny", "messages": [{"role": "user", "content": "x"}, sent_back]})
    assert ask.messages[1] == message_of(server.choices[0][0])


@whole_answers
@chunk_sizes
async def test_completions(scripted: Callable[..., Any], text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    asked: Any = {"model": "tiny", "prompt": [1, 2], "stop": "STOP", "logprobs": 0}
    whole = await server.client().completions.create(**asked)
    Completion.model_validate(whole.model_dump(mode="json"))
    chunks = [one async for one in await server.client().completions.create(stream=True, **asked)]
    parts = [chunk.choices[0] for chunk in chunks]
    (choice,) = whole.choices
    assert "".join(part.text for part in parts) == choice.text == server.choices[0][0].text
    assert choice.logprobs
    for name in ("tokens", "text_offset"):
        told = [one for part in parts if part.logprobs for one in getattr(part.logprobs, name)]
        assert told == getattr(choice.logprobs, name)
    assert parts[-1].finish_reason == choice.finish_reason == "stop"
    assert all(part.finish_reason is None for part in parts[:-1])


async def test_offsets_of_tokens_point_into_the_text(scripted: Callable[..., Any]) -> None:
    server = scripted("the tool 日本 result<|im_end|>", repeat=1)
    whole = await server.client().completions.create(model="tiny", prompt="x", logprobs=1)
    (choice,) = whole.choices
    assert choice.logprobs
    for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
        assert token.startswith("bytes:") or token == "<|im_end|>" or choice.text[offset:].startswith(token)


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE_TOOLS: Any = [{"type": "function", "strict": True, **ADD}]


@whole_answers
@chunk_sizes
async def test_responses(scripted: Callable[..., Any], text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    asked: Any = {"model": "tiny", "input": "x", "tools": RESPONSE_TOOLS, "include": ["message.output_text.logprobs"]}
    whole = await server.client().responses.create(**asked)
    async with server.client().responses.stream(**asked) as stream:
        events = [event async for event in stream]
        summed = await stream.get_final_response()
    Response.model_validate(whole.model_dump(mode="json"))
    assert whole.status == summed.status == "completed"
    assert whole.output_text == summed.output_text == server.choices[0][0].content
    assert whole.usage == summed.usage
    assert [shape(item) for item in whole.output] == [shape(item) for item in summed.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    if whole.output[0].type == "message":
        told = [one.token for event in deltas for one in event.logprobs]
        assert told == [one.token for one in whole.output[0].content[0].logprobs]


def shape(item: Any) -> Any:
    if item.type == "function_call":
        return item.name, item.arguments, item.status
    return item.role, item.status, [(part.type, part.text) for part in item.content]


@whole_answers
async def test_events_of_responses_are_the_packages_own(scripted: Callable[..., Any], text: str) -> None:
    """Raw lines against the union of all event types, which the client itself does not check."""
    server = scripted(text + "<|im_end|>", repeat=1)
    asked: Any = {"model": "tiny", "input": "x", "tools": RESPONSE_TOOLS, "stream": True}
    async with server.client().responses.with_streaming_response.create(**asked) as answer:
        lines = [line async for line in answer.iter_lines()]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert [type(EVENT.validate_python(body)).__name__ for body in bodies]
    assert [body["type"] for body in bodies] == names
    assert (names[0], names[1], names[-1]) == ("response.created", "response.in_progress", "response.completed")


async def test_responses_cut_by_length(scripted: Callable[..., Any]) -> None:
    server = scripted("a long answer<|im_end|>", limit_ids=3)
    whole = await server.client().responses.create(model="tiny", input="x")
    assert whole.status == "incomplete"
    assert whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    async with server.client().responses.stream(model="tiny", input="x") as stream:
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"


@whole_answers
async def test_a_response_sent_back_is_the_message_it_was(scripted: Callable[..., Any], text: str) -> None:
    server = scripted(text + "<|im_end|>", repeat=1)
    whole = await server.client().responses.create(model="tiny", input="x", tools=RESPONSE_TOOLS)
    items = [item.model_dump(exclude_unset=True) for item in whole.output]
    ask = parse_response({"model": "tiny", "input": [{"role": "user", "content": "x"}, *items]})
    assert ask.messages[1] == message_of(server.choices[0][0])


async def test_what_is_refused_is_an_error_of_the_package(scripted: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await scripted("").client().completions.create(model="tiny", prompt="x", suffix="y")
    assert (error.value.param, error.value.code, error.value.type) == (
        "suffix",
        "unsupported_parameter",
        "invalid_request_error",
    )


async def test_a_stream_that_breaks_off_raises(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted("one two<|im_end|>", repeat=4)
    for stream in (ChatStream, CompletionStream, ResponseStream):
        monkeypatch.setattr(stream, "end", lambda self: self.fail(503, "no server left"))
    client = server.client()
    with pytest.raises(openai.APIError, match="no server left"):
        [
            one
            async for one in await client.chat.completions.create(
                model="t", messages=[{"role": "user", "content": "x"}], stream=True
            )
        ]
    with pytest.raises(openai.APIError, match="no server left"):
        [one async for one in await client.completions.create(model="t", prompt="x", stream=True)]
    events = [one async for one in await client.responses.create(model="t", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error
    assert events[-1].response.error.message == "no server left"
    assert ResponseStream.end
