"""/v1/responses: items become the messages that the same conversation has in chat."""

from __future__ import annotations

from typing import Any

from penstock.gateway.wire.responses import parse_response
from penstock.gateway.wire.types import CompletionRequest

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


def ask_for(**fields: Any) -> CompletionRequest:
    return parse_response({"model": "tiny", "input": "What is 1+2?", **fields})


def test_text_is_one_user_message() -> None:
    ask = ask_for(instructions="Be brief.", max_output_tokens=9, temperature=0, previous_response_id="resp_1")
    assert ask.messages == ({"role": "user", "content": "What is 1+2?"},)
    assert (ask.instructions, ask.previous_response_id) == ("Be brief.", "resp_1")
    assert ask.sampling == {"temperature": 0, "max_new_tokens": 9}


def test_items_are_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [output("Let me.")]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad"}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
    ]
    assert ask_for(input=items).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call("c1", {"a": 1}), call("c2", "{")]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "bad", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", {})]},
    )


def output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_tools_have_the_shape_that_templates_take_and_are_repeated_in_the_apis_own() -> None:
    ask = ask_for(tools=[{"type": "function", "strict": True, **ADD}], parallel_tool_calls=False)
    assert ask.tools == ({"type": "function", "function": ADD},)
    assert ask.echo["tools"] == [{"type": "function", "strict": True, **ADD}]
    assert (ask.parallel_tool_calls, ask.echo["parallel_tool_calls"]) == (False, False)


def test_images_only_where_the_model_takes_them() -> None:
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}]}]
    (message,) = parse_response({"model": "tiny", "input": items}, images=True).messages
    assert message == {"role": "user", "content": [{"type": "image", "url": "data:x"}]}


def test_nothing_new_may_be_said_to_an_earlier_response_only() -> None:
    assert ask_for(input=[], previous_response_id="resp_1").messages == ()
