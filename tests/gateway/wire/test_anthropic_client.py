"""The real `anthropic` client: the sum of a stream is the whole answer, and both are the package's own types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from tests.gateway.wire.shapes import MessageAnswer

from penstock.gateway.wire.chat import message_of
from penstock.gateway.wire.messages import parse_messages

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
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
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASKED: Any = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
whole_answers = pytest.mark.parametrize("text", ANSWERS.values(), ids=list(ANSWERS))
chunk_sizes = pytest.mark.parametrize("chunk_ids", [1, 5])


@whole_answers
@chunk_sizes
async def test_messages(scripted: Callable[..., Any], text: str, chunk_ids: int) -> None:
    server = scripted(text + "<|im_end|>", chunk_ids=chunk_ids)
    client = server.anthropic()
    whole = await client.messages.create(**ASKED, stop_sequences=["STOP"])
    async with client.messages.stream(**ASKED, stop_sequences=["STOP"]) as stream:
        summed = await stream.get_final_message()
    Message.model_validate(whole.model_dump(mode="json"))
    MessageAnswer.model_validate(whole.model_dump(mode="json", exclude_unset=True))
    assert comparable(summed) == comparable(whole)
    assert whole.usage.output_tokens == len(server.choices[0][0].token_ids)
    assert whole.usage.input_tokens == 11


def comparable(message: Message) -> Any:
    """Without ids of the answer and of calls, which are its."""
    found = message.model_dump(mode="json")
    assert found.pop("id").startswith("msg_")
    for block in found["content"]:
        block.pop("parsed_output", None)
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("call_")
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        (ANSWERS["text"], ["text"], "end_turn"),
        (ANSWERS["thinking"], ["thinking", "text"], "end_turn"),
        (ANSWERS["thinking and a call"], ["thinking", "tool_use"], "tool_use"),
        (ANSWERS["text and two calls"], ["text", "tool_use", "tool_use"], "tool_use"),
        (ANSWERS["empty"], [], "end_turn"),
        (ANSWERS["stop string"], ["text"], "stop_sequence"),
    ],
)
async def test_blocks_and_reasons(scripted: Callable[..., Any], text: str, kinds: list[str], reason: str) -> None:
    message = await scripted(text + "<|im_end|>").anthropic().messages.create(**ASKED, stop_sequences=["Z", "STOP"])
    assert [block.type for block in message.content] == kinds
    assert (message.stop_reason, message.stop_sequence) == (reason, "STOP" if reason == "stop_sequence" else None)
    for block in message.content:
        if block.type == "thinking":
            assert block.thinking == "hm"
        if block.type == "tool_use":
            assert block.input == {"a": 1, "b": "é"}


async def test_prompt_that_opened_the_thinking(scripted: Callable[..., Any]) -> None:
    server = scripted("hm\n</think>\n\nyes<|im_end|>", inside_thinking=True)
    message = await server.anthropic().messages.create(**ASKED)
    assert [(block.type, getattr(block, block.type)) for block in message.content] == [
        ("thinking", "hm"),
        ("text", "yes"),
    ]


async def test_messages_cut_by_length(scripted: Callable[..., Any]) -> None:
    server = scripted(f"Let me see.\n{CALL}<|im_end|>", limit_ids=20)
    whole = await server.anthropic().messages.create(**ASKED)
    async with server.anthropic().messages.stream(**ASKED) as stream:
        summed = await stream.get_final_message()
    assert whole.stop_reason == summed.stop_reason == "max_tokens"
    assert [block.type for block in whole.content] == [block.type for block in summed.content] == ["text"]


@whole_answers
async def test_events_are_the_packages_own(scripted: Callable[..., Any], text: str) -> None:
    """Raw lines against the union of all event types, which the client itself does not check."""
    server = scripted(text + "<|im_end|>", repeat=1)
    async with server.anthropic().messages.with_streaming_response.create(**ASKED, stream=True) as answer:
        lines = [line async for line in answer.iter_lines()]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert [type(EVENT.validate_python(body)).__name__ for body in bodies]
    assert [body["type"] for body in bodies] == names
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])


@whole_answers
@pytest.mark.parametrize("dump", [None, {"exclude_none": True}, {"exclude_unset": True}], ids=str)
async def test_an_answer_sent_back_is_the_message_it_was(
    scripted: Callable[..., Any], text: str, dump: dict[str, Any] | None
) -> None:
    server = scripted(text + "<|im_end|>")
    client = server.anthropic()
    whole = await client.messages.create(**ASKED)
    content = whole.content if dump is None else [block.model_dump(**dump) for block in whole.content]
    turns = [*ASKED["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "y"}]
    await client.messages.create(**{**ASKED, "messages": turns})
    sent_back, expected = server.asks[-1].messages[1], message_of(server.choices[0][0])
    assert sent_back == expected
    assert parse_messages({**server.bodies[-1]}).messages[1] == expected


async def test_what_is_refused_is_an_error_of_the_package(scripted: Callable[..., Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        await scripted("").anthropic().messages.create(**ASKED, tool_choice={"type": "any"})
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert error.value.body["error"]["message"].startswith("tool_choice: ")


async def test_a_stream_that_breaks_off_raises(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted("one two<|im_end|>", repeat=1)
    monkeypatch.setattr(
        "penstock.gateway.wire.messages_answers.MessageStream.end", lambda self: self.fail(503, "no server left")
    )
    with pytest.raises(anthropic.APIStatusError, match="no server left"):
        [one async for one in await server.anthropic().messages.create(**ASKED, stream=True)]
