"""What each API's parser refuses: the field as the client wrote it, the code, and the reason."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.types import Api, InvalidRequest
from penstock.gateway.wire.wires import WIRES

USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
BODIES: dict[Api, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "x"},
    "responses": {"model": "m", "input": "x"},
    "messages": {"model": "m", "messages": [USER], "max_tokens": 9},
}
NESTED: Any = {}
for _ in range(5000):
    NESTED = {"a": NESTED}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
EVERYWHERE = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"model": None}, "model"),
    ({"temprature": 1}, "temprature"),
]
"""Refused by every API."""
WRONG: dict[Api, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "function", "content": "x", "name": "f"}]}, "messages.1"),
        ({"messages": [USER, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{**USER, "contents": "x"}]}, "messages.0.contents"),
        (turn("user", {"type": "text"}), "messages.0.content.0.text"),
        (turn("user", {"type": "input_audio"}), "messages.0.content.0"),
        (turn("user", {"type": "image_url", "image_url": {"url": "u"}}), "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls.0.function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "body": 1}}]}, "tools.0.function.body"),
        ({"tools": [FUNCTION] * 2}, "tools.1"),
    ],
    "completions": [
        ({"echo": "yes"}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": None}, "prompt"),
        ({"tools": []}, "tools"),
    ],
    "responses": [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0.call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"stop": "x"}, "stop"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
    "messages": [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (turn("user"), "messages.0.content"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "messages.1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        (turn("user", use("c1")), "messages.0.content.0"),
        (turn("user", {"type": "document"}), "messages.0.content.0"),
        (turn("user", {"type": "text", "text": "x"}, IMAGE), "messages.0.content.1"),
        (turn("user", result("c1", [IMAGE])), "messages.0.content.0.content.0"),
        (turn("user", result("c1", [{"type": "search_result"}])), "messages.0.content.0.content.0"),
        (turn("assistant", use("c1"), {"type": "text", "text": "then"}), "messages.0.content.1"),
        (turn("assistant", {"type": "server_tool_use"}), "messages.0.content.0"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"tools": [TOOL, TOOL]}, "tools.1"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
    ],
}
"""A field that is wrong, or none of this API's."""
UNSUPPORTED: dict[Api, list[tuple[str, Any, str]]] = {
    "chat": [
        ("logit_bias", {"1": 5}, "another distribution"),
        ("presence_penalty", 0.5, "another distribution"),
        ("frequency_penalty", -1, "another distribution"),
        ("min_p", 0.1, "another distribution"),
        ("repetition_penalty", 1.1, "another distribution"),
        ("response_format", {"type": "json_object"}, "sampling is not constrained"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "sampling is not constrained"),
        ("audio", {"voice": "x"}, "answers are text"),
        ("web_search_options", {}, "a service of OpenAI's"),
        ("modalities", ["text", "audio"], "answers are text"),
        ("functions", [{"name": "f"}], "the old name of tools"),
        ("reasoning_effort", "low", "no such setting"),
        ("top_logprobs", 1, "the sampled token's log-probability alone"),
        ("top_logprobs", False, "the sampled token's log-probability alone"),
        ("tool_choice", "required", "'required' is not supported here: sampling is not constrained"),
        ("tool_choice", FUNCTION, "a named tool is not supported here"),
    ],
    "completions": [
        ("logprobs", 2, "the sampled token's log-probability alone"),
        ("suffix", "end", "no text is inserted"),
        ("best_of", 2, "other than n"),
        ("prompt", ["a", "b"], "one prompt per request"),
        ("prompt", [[1], [2]], "one prompt per request"),
    ],
    "responses": [
        ("tool_choice", "required", "sampling is not constrained"),
        ("background", True, "no answer is kept running"),
        ("conversation", "conv_1", "no conversations are stored"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "sampling is not constrained"),
        ("reasoning", {"effort": "low"}, "no such setting"),
        ("truncation", "auto", "contexts only grow"),
        ("top_logprobs", 5, "the sampled token's log-probability alone"),
    ],
    "messages": [
        ("tool_choice", {"type": "any"}, "sampling is not constrained"),
        ("tool_choice", {"type": "tool", "name": "add"}, "sampling is not constrained"),
        ("output_format", {"type": "json_schema"}, "sampling is not constrained"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "contexts only grow"),
        ("container", "c", "is not supported here"),
        ("mcp_servers", [{"url": "x"}], "is not supported here"),
    ],
}
"""A value that would change what is sampled, or asks for what an answer cannot hold."""


def refusal(api: Api, fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        WIRES[api].parse({**BODIES[api], **fields})
    return error.value


@pytest.mark.parametrize(
    ("api", "fields", "name"),
    [(api, *row) for api, rows in WRONG.items() for row in [*EVERYWHERE, *rows]],
    ids=str,
)
def test_wrong_field_is_named_as_the_client_wrote_it(api: Api, fields: dict[str, Any], name: str) -> None:
    assert refusal(api, fields).field == name


@pytest.mark.parametrize(
    ("api", "name", "value", "reason"), [(api, *row) for api, rows in UNSUPPORTED.items() for row in rows], ids=str
)
def test_unsupported_value_is_refused_with_its_reason(api: Api, name: str, value: Any, reason: str) -> None:
    error = refusal(api, {name: value})
    assert (error.field, error.code) == (name, "unsupported_parameter")
    assert reason in error.message


def test_refusals_of_fields_together_and_inside() -> None:
    assert refusal("completions", {"echo": True, "logprobs": 1}).field == "echo"
    assert refusal("messages", {"output_config": {"format": {"type": "json_schema"}}}).field == "output_config.format"
    assert "at most 4 items, not 5" in refusal("chat", {"stop": list("abcde")}).message


def test_unknown_field_is_refused_with_the_nearest_name() -> None:
    error = refusal("chat", {"temprature": 1})
    assert error.code == "unknown_parameter"
    assert "did you mean 'temperature'?" in error.message


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("body", [None, [], "text", 3, {}], ids=str)
def test_body_that_is_no_request_is_refused(api: Api, body: Any) -> None:
    with pytest.raises(InvalidRequest):
        WIRES[api].parse(body)


def test_bottomless_nesting_is_refused() -> None:
    assert refusal("chat", {"metadata": NESTED}).field.startswith("metadata")
