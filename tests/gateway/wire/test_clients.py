"""The real `openai` and `anthropic` clients: what they put together from a stream is what they get whole, in their own
types; what they send back is the message that it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.gateway.wire.conftest import Scripted, check_known

from penstock.gateway.wire.chat import ChatStream, message_of
from penstock.gateway.wire.completions import CompletionStream
from penstock.gateway.wire.messages_answers import MessageStream
from penstock.gateway.wire.responses_stream import ResponseStream
from penstock.gateway.wire.wires import WIRES

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
USER = {"role": "user", "content": "x"}
CHAT: Any = {
    "model": "tiny",
    "messages": [USER],
    "tools": [{"type": "function", "function": ADD}],
    "stop": ["STOP"],
    "logprobs": True,
}
COMPLETION: Any = {"model": "tiny", "prompt": [1, 2], "stop": "STOP", "logprobs": 0}
RESPONSE: Any = {
    "model": "tiny",
    "input": [USER],
    "tools": [{"type": "function", "strict": True, **ADD}],
    "include": ["message.output_text.logprobs"],
}
MESSAGES: Any = {
    "model": "tiny",
    "max_tokens": 400,
    "messages": [USER],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    "stop_sequences": ["STOP"],
}
BODIES = {"chat": CHAT, "completions": COMPLETION, "responses": RESPONSE, "messages": MESSAGES}
USAGE = {"stream_options": {"include_usage": True}}
ANSWERS = {
    "text": "日本 👩‍👩‍👧 yes\n",
    "thinking": "<think>\nhm\n</think>\n\nyes",
    "thinking and a call": f"<think>\nhm\n</think>\n\n{CALL}",
    "no thinking": "<think>\n\n</think>\n\nyes",
    "endless thinking": "<think>\nhm",
    "empty": "",
    "one call": CALL,
    "text and two calls": f"Let me see.\n{CALL}\n{CALL}",
    "broken call": '<tool_call>\n{"name": "add"\n</tool_call>',
    "half a stop string": "a STO",
    "stop string": "a STOP b",
}
EVENTS: dict[str, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletionChunk),
    "responses": TypeAdapter(ResponseStreamEvent),
    "messages": TypeAdapter(RawMessageStreamEvent),
}
Serve = Callable[..., Scripted]
any_answer = pytest.mark.parametrize("text", ANSWERS.values(), ids=list(ANSWERS))
chunk_sizes = pytest.mark.parametrize("chunk_ids", [1, 5])


@any_answer
@pytest.mark.parametrize("api", EVENTS)
async def test_events_are_the_packages_own(scripted: Serve, text: str, api: Any) -> None:
    """Raw lines: the clients themselves do not check them."""
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(scripted(text + "<|im_end|>", repeat=1))) as http:
        answer = await http.post(f"http://x/v1/{WIRES[api].path}", json={**BODIES[api], "stream": True})
    lines = [line.partition(": ") for line in answer.text.splitlines() if line]
    bodies = [json.loads(data) for field, _, data in lines if field == "data" and data != "[DONE]"]
    for body in bodies:
        EVENTS[api].validate_python(body)
    names = [data for field, _, data in lines if field == "event"]
    assert names == [body["type"] for body in bodies if "type" in body]
    first, last = {
        "messages": (["message_start"], ["message_delta", "message_stop"]),
        "responses": (["response.created", "response.in_progress"], ["response.completed"]),
    }.get(api, ([], []))
    assert (names[: len(first)], names[len(names) - len(last) :]) == (first, last)
    assert (lines[-1][2] == "[DONE]") is (api == "chat")


def plain(answer: Any, *ids: str) -> Any:
    """An answer without absent fields, ids of itself and its calls, and log-probabilities, which count the tokens."""
    if isinstance(answer, list):
        return [plain(one, *ids) for one in answer]
    if not isinstance(answer, dict):
        return answer
    if str(answer.get("id")).startswith(("call_", *ids)):
        answer.pop("id")
    others = ("logprob", "parsed", "parsed_output", "parsed_arguments", "index", "created")
    found = {name: plain(one, *ids) for name, one in answer.items() if name not in others}
    return {name: one for name, one in found.items() if one not in (None, [], "")}


@any_answer
@chunk_sizes
async def test_chat_summed_by_its_client_is_the_whole(scripted: Serve, text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    whole = await server.client().chat.completions.create(**CHAT)
    async with server.client().chat.completions.stream(**CHAT, **USAGE) as stream:
        summed = await stream.get_final_completion()
    check_known(ChatCompletion.model_validate(whole.model_dump(mode="json", exclude_unset=True)))
    assert plain(summed.model_dump(mode="json"), "chatcmpl-") == {
        **plain(whole.model_dump(mode="json"), "chatcmpl-"),
        "object": summed.object,
    }
    (answer,), _ = server.choices
    message, logprobs = whole.choices[0].message, whole.choices[0].logprobs
    assert message.content == (answer.content or None if answer.calls else answer.content)
    assert logprobs
    assert b"".join(bytes(one.bytes) for one in logprobs.content) == b"".join(one.raw for one in answer.tokens)
    assert all(one.logprob < 0 for one in logprobs.content)


async def test_chat_has_several_choices(scripted: Serve) -> None:
    server = scripted("日本<|im_end|>", f"Hm. {CALL}<|im_end|>", "third, longer than the others<|im_end|>")
    whole = await server.client().chat.completions.create(**CHAT, n=3)
    async with server.client().chat.completions.stream(**CHAT, **USAGE, n=3) as stream:
        summed = await stream.get_final_completion()
    assert plain(summed.model_dump()["choices"]) == plain(whole.model_dump()["choices"])
    assert [choice.message.content for choice in whole.choices] == ["日本", "Hm.", "third, longer than the others"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "tool_calls", "stop"]
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in server.choices[0])


@any_answer
@chunk_sizes
async def test_completion_summed_is_the_whole(scripted: Serve, text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    whole = await server.client().completions.create(**COMPLETION)
    check_known(Completion.model_validate(whole.model_dump(mode="json", exclude_unset=True)))
    chunks = await server.client().completions.create(**COMPLETION, stream=True)
    parts = [chunk.choices[0] async for chunk in chunks]
    (choice,) = whole.choices
    assert "".join(part.text for part in parts) == choice.text == server.choices[0][0].text
    for name in ("tokens", "text_offset"):
        streamed = [one for part in parts if part.logprobs for one in getattr(part.logprobs, name)]
        assert streamed == getattr(choice.logprobs, name)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert choice.finish_reason == "stop"


async def test_offsets_of_tokens_point_into_the_text(scripted: Serve) -> None:
    server = scripted("the tool 日本 result<|im_end|>", repeat=1)
    (choice,) = (await server.client().completions.create(model="tiny", prompt="x", logprobs=1)).choices
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or token == "<|im_end|>" or choice.text[offset:].startswith(token)


@any_answer
@chunk_sizes
async def test_response_summed_by_its_client_is_the_whole(scripted: Serve, text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    whole = await server.client().responses.create(**RESPONSE)
    async with server.client().responses.stream(**RESPONSE) as stream:
        events = [event async for event in stream]
        summed = await stream.get_final_response()
    check_known(Response.model_validate(whole.model_dump(mode="json", exclude_unset=True)))
    assert whole.status == summed.status == "completed"
    assert whole.output_text == summed.output_text == server.choices[0][0].content
    ids = ("msg_", "fc_")
    for field in ("usage", "output"):
        left, right = (plain(one.model_dump(mode="json")[field], *ids) for one in (summed, whole))
        assert without_calls_ids(left) == without_calls_ids(right)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    if whole.output[0].type == "message":
        streamed = [one.token for event in deltas for one in event.logprobs]
        assert streamed == [one.token for one in whole.output[0].content[0].logprobs]


def without_calls_ids(items: Any) -> Any:
    return [{name: one for name, one in item.items() if name != "call_id"} for item in items if isinstance(item, dict)]


@any_answer
@chunk_sizes
async def test_message_summed_by_its_client_is_the_whole(scripted: Serve, text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    whole = await server.anthropic().messages.create(**MESSAGES)
    async with server.anthropic().messages.stream(**MESSAGES) as stream:
        summed = await stream.get_final_message()
    check_known(Message.model_validate(whole.model_dump(mode="json", exclude_unset=True)))
    assert plain(summed.model_dump(mode="json"), "msg_") == plain(whole.model_dump(mode="json"), "msg_")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (11, len(server.choices[0][0].token_ids))


@pytest.mark.parametrize(
    ("text", "blocks", "reason", "stop"),
    [
        ("text", [("text", ANSWERS["text"])], "end_turn", None),
        ("thinking", [("thinking", "hm"), ("text", "yes")], "end_turn", None),
        ("thinking and a call", [("thinking", "hm"), ("tool_use", {"a": 1, "b": "é"})], "tool_use", None),
        ("text and two calls", [("text", "Let me see."), *[("tool_use", {"a": 1, "b": "é"})] * 2], "tool_use", None),
        ("empty", [], "end_turn", None),
        ("stop string", [("text", "a ")], "stop_sequence", "STOP"),
    ],
)
async def test_message_has_its_blocks_and_its_reason(
    scripted: Serve, text: str, blocks: list[Any], reason: str, stop: str | None
) -> None:
    body = {**MESSAGES, "stop_sequences": ["Z", "STOP"]}
    message = await scripted(ANSWERS[text] + "<|im_end|>").anthropic().messages.create(**body)
    assert list(map(block_of, message.content)) == blocks
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)


def block_of(block: Any) -> tuple[str, Any]:
    return block.type, block.input if block.type == "tool_use" else getattr(block, block.type)


async def test_message_begins_with_the_thinking_that_the_prompt_opened(scripted: Serve) -> None:
    server = scripted("hm\n</think>\n\nyes<|im_end|>", inside_thinking=True)
    message = await server.anthropic().messages.create(**MESSAGES)
    assert list(map(block_of, message.content)) == [("thinking", "hm"), ("text", "yes")]


async def test_answer_cut_by_length_says_so_and_has_no_calls(scripted: Serve) -> None:
    server = scripted(f"Let me see.\n{CALL}<|im_end|>", repeat=6, limit_ids=20)
    chat = await server.client().chat.completions.create(**CHAT)
    chunks = [one async for one in await server.client().chat.completions.create(stream=True, **CHAT)]
    (choice,) = chat.choices
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert not choice.message.tool_calls
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    message = await server.anthropic().messages.create(**MESSAGES)
    async with server.anthropic().messages.stream(**MESSAGES) as stream:
        summed = await stream.get_final_message()
    assert message.stop_reason == summed.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == [block.type for block in summed.content] == ["text"]
    response = await server.client().responses.create(**RESPONSE)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    async with server.client().responses.stream(**RESPONSE) as events:
        assert [event async for event in events][-1].type == "response.incomplete"


DUMPS = [{}, {"exclude_none": True}, {"exclude_unset": True}]


@any_answer
@pytest.mark.parametrize(
    ("api", "dump"),
    [*(("chat", dump) for dump in DUMPS), ("responses", DUMPS[2]), *(("messages", dump) for dump in DUMPS)],
)
async def test_answer_sent_back_is_the_message_it_was(
    scripted: Serve, text: str, api: Any, dump: dict[str, Any]
) -> None:
    server = scripted(text + "<|im_end|>", repeat=1)
    if api == "chat":
        chat = await server.client().chat.completions.create(**CHAT)
        body = {**CHAT, "messages": [USER, chat.choices[0].message.model_dump(**dump)]}
    elif api == "responses":
        response = await server.client().responses.create(**RESPONSE)
        body = {**RESPONSE, "input": [USER, *(item.model_dump(**dump) for item in response.output)]}
    else:
        message = await server.anthropic().messages.create(**MESSAGES)
        blocks = [block.model_dump(**dump) for block in message.content]
        body = {**MESSAGES, "messages": [USER, {"role": "assistant", "content": blocks}, USER]}
    assert WIRES[api].parse(body).messages[1] == message_of(server.choices[0][0])


async def test_blocks_sent_back_as_objects_are_the_message_they_were(scripted: Serve) -> None:
    server = scripted(ANSWERS["thinking and a call"] + "<|im_end|>")
    whole = await server.anthropic().messages.create(**MESSAGES)
    turns = [USER, {"role": "assistant", "content": whole.content}, USER]
    await server.anthropic().messages.create(**{**MESSAGES, "messages": turns})
    assert server.asks[-1].messages[1] == message_of(server.choices[0][0])


async def test_refusal_is_an_error_of_the_package(scripted: Serve) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted("").client().completions.create(model="tiny", prompt="x", suffix="y")
    error = refused.value
    assert (error.param, error.code, error.type) == ("suffix", "unsupported_parameter", "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError) as other:
        await scripted("").anthropic().messages.create(**MESSAGES, tool_choice={"type": "any"})
    assert (other.value.body["type"], other.value.body["error"]["type"]) == ("error", "invalid_request_error")
    assert other.value.body["error"]["message"].startswith("tool_choice: ")


async def test_stream_that_breaks_off_raises(scripted: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted("one two<|im_end|>", repeat=4)
    for stream in (ChatStream, CompletionStream, ResponseStream, MessageStream):
        monkeypatch.setattr(stream, "end", lambda self: self.fail(503, "no server left"))
    client = server.client()
    for error, ask, body in (
        (openai.APIError, client.chat.completions.create, CHAT),
        (openai.APIError, client.completions.create, COMPLETION),
        (anthropic.APIStatusError, server.anthropic().messages.create, MESSAGES),
    ):
        with pytest.raises(error, match="no server left"):
            [one async for one in await ask(**body, stream=True)]
    last = [one async for one in await client.responses.create(**RESPONSE, stream=True)][-1]
    assert (last.type, last.response.error.message) == ("response.failed", "no server left")
