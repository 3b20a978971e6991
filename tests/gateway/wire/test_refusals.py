"""What each API's parser refuses: the field as the client wrote it, the code, and the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.gateway.requests import check_calls
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
TEXT = {"type": "text", "text": "x"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:x"}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {}}
EVERYWHERE = "chat completions responses messages"
DISTRIBUTION, CONSTRAINED = "another distribution", "sampling is not constrained"
SAMPLED, GROWS = "the sampled token's log-probability alone", "contexts only grow"
Rows = list[tuple[str, dict[str, Any], str, str]]
"""APIs, fields of the request, the field that is named, words of the reason."""
WRONG: Rows = [
    (EVERYWHERE, {"temperature": 3}, "temperature", ""),
    (EVERYWHERE, {"temperature": "1"}, "temperature", ""),
    (EVERYWHERE, {"temperature": float("nan")}, "temperature", "finite"),
    (EVERYWHERE, {"top_p": 0}, "top_p", ""),
    (EVERYWHERE, {"model": None}, "model", ""),
    ("chat completions", {"n": 17}, "n", ""),
    ("chat completions", {"n": True}, "n", ""),
    ("chat completions messages", {"max_tokens": 0}, "max_tokens", ""),
    ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "max_completion_tokens"),
    ("messages", {"max_tokens": None}, "max_tokens", ""),
    ("chat", turn("user", {"type": "text", "text": 5}), "messages.0.content.0.text", "valid string"),
    ("chat", turn("user", {"type": "image_url", "image_url": {}}), "messages.0.content.0.image_url.url", "required"),
    ("chat completions", {"stop": list("abcde")}, "stop", "at most 4 items, not 5"),
    ("chat completions", {"stop": ""}, "stop", ""),
    ("chat completions", {"stop": ["a", ""]}, "stop.1", ""),
    ("chat completions", {"seed": 2**70}, "seed", ""),
    ("completions", {"echo": True}, "echo", "the client has the prompt"),
    ("completions", {"logprobs": True}, "logprobs", ""),
    ("completions", {"prompt": []}, "prompt", ""),
    ("completions", {"prompt": ""}, "prompt", ""),
    ("completions", {"prompt": [1, -1]}, "prompt.1", ""),
    ("completions", {"prompt": None}, "prompt", ""),
    # messages
    ("chat messages", {"messages": []}, "messages", ""),
    ("chat", {"messages": [USER, {"role": "function", "content": "x", "name": "f"}]}, "messages.1", ""),
    ("chat", {"messages": [USER, {"role": "user"}]}, "messages.1.content", ""),
    ("chat", turn("user", {"type": "text"}), "messages.0.content.0.text", ""),
    ("chat", turn("user", {"type": "input_audio"}), "messages.0.content.0", ""),
    ("chat", turn("user", {"type": "image_url", "image_url": {"url": "u"}}), "messages.0.content.0", "no images"),
    ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "no Unicode"),
    ("messages", {"tools": [{**TOOL, "input_schema": {"\ud800": 1}}]}, r"tools.0.input_schema.\ud800", "no Unicode"),
    ("chat", {"messages": [{"role": "tool", "content": "3"}]}, "messages.0.tool_call_id", ""),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
        "messages.0.tool_calls.0.function",
        "",
    ),
    ("responses", {"input": None}, "input", ""),
    ("responses", {"input": []}, "input", "no message"),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", ""),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0", ""),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input.0.content.0",
        "no images",
    ),
    ("responses", {"input": [{"type": "function_call", "name": "add"}]}, "input.0.call_id", ""),
    ("messages", turn("user"), "messages.0.content", ""),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        "messages.1",
        "cannot be continued",
    ),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0", ""),
    ("messages", turn("user", use("c1")), "messages.0.content.0", ""),
    ("messages", turn("user", {"type": "document"}), "messages.0.content.0", ""),
    ("messages", turn("user", {"type": "text", "text": "x"}, IMAGE), "messages.0.content.1", "no images"),
    ("messages", turn("user", result("c1", "x"), IMAGE), "messages.0.content.1", "no images"),
    ("messages", turn("user", result("c1", [IMAGE])), "messages.0.content.0.content.0", "no images"),
    ("messages", turn("user", result("c1", [{"type": "search_result"}])), "messages.0.content.0.content.0", ""),
    ("messages", turn("assistant", use("c1"), {"type": "text", "text": "then"}), "messages.0.content.1", "tool_use"),
    ("messages", turn("assistant", {"type": "server_tool_use"}), "messages.0.content.0", ""),
    ("messages", {"system": [{"type": "image"}]}, "system.0.type", ""),
    # tools
    ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type", ""),
    ("chat", {"tools": [FUNCTION] * 2}, "tools.1", "'f'"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools.0.type", ""),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", ""),
    ("messages", {"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", ""),
    ("messages", {"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples", ""),
    ("messages", {"tools": [TOOL, TOOL]}, "tools.1", "'add'"),
    ("chat", {"tools": []}, "tools", "at least 1 item"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "my tool"}}]}, "tools.0.function.name", "pattern"),
    ("responses", {"tools": [{"type": "function", "name": "a" * 129}]}, "tools.0.name", "pattern"),
    ("messages", {"tools": [{**TOOL, "name": "a.b"}]}, "tools.0.name", "pattern"),
    ("messages", {"stop_sequences": ["x", " \n"]}, "stop_sequences.1", "pattern"),
    ("messages", {"messages": [{"role": "user", "content": ""}]}, "messages.0.content", "at least 1"),
    ("messages", turn("user", {"type": "text", "text": ""}), "messages.0.content.0.text", "at least 1"),
]
UNKNOWN: Rows = [
    (EVERYWHERE, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    ("completions", {"tools": []}, "tools", "unknown field"),
    ("responses messages", {"stop": "x"}, "stop", "unknown field"),
    ("responses", {"max_tokens": 5}, "max_tokens", "unknown field"),
    ("messages", {"n": 2}, "n", "unknown field"),
    ("chat", {"messages": [{**USER, "contents": "x"}]}, "messages.0.contents", "unknown field"),
    ("chat", turn("user", {**TEXT, "cache_control": {}}), "messages.0.content.0.cache_control", "unknown field"),
    ("chat", turn("user", {**PICTURE, "cache_control": {}}), "messages.0.content.0.cache_control", "unknown field"),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "f", "body": 1}}]},
        "tools.0.function.body",
        "unknown field",
    ),
]
"""Of no API, or of another one."""
UNSUPPORTED: Rows = [
    ("chat completions", {"logit_bias": {"1": 5}}, "logit_bias", DISTRIBUTION),
    ("chat completions", {"presence_penalty": 0.5}, "presence_penalty", DISTRIBUTION),
    ("chat completions", {"frequency_penalty": -1}, "frequency_penalty", DISTRIBUTION),
    ("chat completions", {"min_p": 0.1}, "min_p", DISTRIBUTION),
    ("chat completions", {"repetition_penalty": 1.1}, "repetition_penalty", DISTRIBUTION),
    ("chat completions", {"response_format": {"type": "json_object"}}, "response_format", CONSTRAINED),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", CONSTRAINED),
    ("chat", {"audio": {"voice": "x"}}, "audio", "answers are text"),
    ("chat", {"web_search_options": {}}, "web_search_options", "a service of OpenAI's"),
    ("chat", {"modalities": ["text", "audio"]}, "modalities", "answers are text"),
    ("chat", {"functions": [{"name": "f"}]}, "functions", "the old name of tools"),
    ("chat", {"reasoning_effort": "low"}, "reasoning_effort", "no such setting"),
    ("chat responses", {"top_logprobs": 5}, "top_logprobs", SAMPLED),
    ("chat", {"top_logprobs": False}, "top_logprobs", SAMPLED),
    (
        "chat responses",
        {"tool_choice": "required"},
        "tool_choice",
        f"'required' is not supported here: {CONSTRAINED}",
    ),
    ("chat", {"tool_choice": FUNCTION}, "tool_choice", "a named tool is not supported here"),
    ("completions", {"logprobs": 2}, "logprobs", SAMPLED),
    ("completions", {"suffix": "end"}, "suffix", "no text is inserted"),
    ("completions", {"best_of": 2}, "best_of", "other than n"),
    ("completions", {"prompt": ["a", "b"]}, "prompt", "one prompt per request"),
    ("completions", {"prompt": [[1], [2]]}, "prompt", "one prompt per request"),
    ("responses", {"background": True}, "background", "no answer is kept running"),
    ("responses", {"conversation": "conv_1"}, "conversation", "no conversations are stored"),
    ("responses", {"text": {"format": SCHEMA}}, "text", CONSTRAINED),
    ("responses", {"reasoning": {"effort": "low"}}, "reasoning", "no such setting"),
    ("responses", {"truncation": "auto"}, "truncation", GROWS),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", CONSTRAINED),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", CONSTRAINED),
    ("messages", {"tool_choice": {"type": "auto", "name": "add"}}, "tool_choice", "a named tool"),
    ("messages", {"output_format": SCHEMA}, "output_format", CONSTRAINED),
    ("messages", {"output_config": {"format": SCHEMA}}, "output_config.format", CONSTRAINED),
    (
        "messages",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
        GROWS,
    ),
    ("messages", {"container": "c"}, "container", "is not supported here"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "is not supported here"),
]
"""Would change what is sampled, or asks for what an answer cannot hold."""
CODES = {"": WRONG, "unknown_parameter": UNKNOWN, "unsupported_parameter": UNSUPPORTED}


@pytest.mark.parametrize(
    ("code", "api", "fields", "name", "words"),
    [(code, api, *row) for code, rows in CODES.items() for apis, *row in rows for api in apis.split()],
    ids=str,
)
def test_refusal_names_the_field_and_the_reason(
    code: str, api: Api, fields: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        WIRES[api].parse({**BODIES[api], **fields})
    assert refused.value.field == name
    assert words in str(refused.value)
    assert code in ("", refused.value.code)


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("body", [None, [], "text", 3, {}], ids=str)
def test_body_that_is_no_request_is_refused(api: Api, body: Any) -> None:
    with pytest.raises(InvalidRequest):
        WIRES[api].parse(body)


def test_bottomless_nesting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^metadata.*nested too deeply"):
        WIRES["chat"].parse({**BODIES["chat"], "metadata": NESTED})


ANSWER = {"role": "tool", "content": "3", "tool_call_id": "c1"}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "3"}


@pytest.mark.parametrize(
    ("api", "messages", "problem"),
    [
        ("chat", [USER, CALLS, ANSWER], None),
        ("chat", [USER, CALLS, ANSWER, USER, CALLS, ANSWER], None),
        ("chat", [USER, ANSWER], "messages.1: is a result for 'c1', which is not a call"),
        ("chat", [USER, CALLS, {**ANSWER, "tool_call_id": "c2"}], "messages.2: is a result for 'c2'"),
        ("chat", [USER, CALLS, USER], "messages.2: each call must be answered by a result, and has none: c1"),
        ("chat", [USER, CALLS], "messages: each call must be answered"),
        ("chat", [USER, CALLS, ANSWER, USER, ANSWER], "messages.4: is a result for 'c1'"),
        ("responses", [CALL_ITEM, OUTPUT_ITEM], None),
        ("responses", [OUTPUT_ITEM, CALL_ITEM], "input: is a result for 'c1', which is not a call before it"),
        ("responses", [{**USER, "type": "message"}, CALL_ITEM], "input: each call must be answered"),
        ("messages", turn("user", result("t1", "3"))["messages"], "messages.0: is a result for 't1'"),
        ("messages", turn("assistant", use("t1"))["messages"], "messages.1: each call must be answered"),
    ],
)
def test_calls_and_results_belong_together(api: Api, messages: list[Any], problem: str | None) -> None:
    fields = {"input" if api == "responses" else "messages": messages}
    request = WIRES[api].parse({**BODIES[api], **fields})
    if problem is None:
        check_calls(request.messages, api)
    else:
        with pytest.raises(InvalidRequest, match=re.escape(problem)):
            check_calls(request.messages, api)
