"""Any JSON gives a `CompletionRequest` or an `InvalidRequest` that names a field; never another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.errors import refusal_of
from penstock.gateway.wire.chat import ChatBody, parse_chat
from penstock.gateway.wire.completions import CompletionBody, parse_completion
from penstock.gateway.wire.messages import CountBody, MessagesBody, parse_count_tokens, parse_messages
from penstock.gateway.wire.messages_answers import anthropic_error_body
from penstock.gateway.wire.responses import ResponseBody, parse_response
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest

Parse = Callable[[Any], CompletionRequest]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "x", "tool_call_id": "c"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "h", "signature": "penstock.WyJhIiwgImIiXQ=="},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
        ],
    },
    {"role": "system", "content": "s"},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}],
    },
]
TOOLS_OF_TURNS = [{"name": "f", "input_schema": {"type": "object"}}]
TURNS_BODY = {"model": "m", "system": [{"type": "text", "text": "s"}], "messages": TURNS, "tools": TOOLS_OF_TURNS}
ROUTES = [
    (parse_chat, ChatBody, {"model": "m", "messages": MESSAGES}),
    (parse_completion, CompletionBody, {"model": "m", "prompt": [[1, 2]]}),
    (parse_response, ResponseBody, {"model": "m", "input": ITEMS}),
    (parse_messages, MessagesBody, {**TURNS_BODY, "max_tokens": 5, "tool_choice": {"type": "auto"}}),
    (parse_count_tokens, CountBody, TURNS_BODY),
]
NAMES = ["chat", "completions", "responses", "messages", "count_tokens"]
OTHER_FIELDS = [
    *("audio", "background", "context_management", "conversation", "echo", "function_call", "functions", "image"),
    *("logit_bias", "max_tool_calls", "metadata", "modalities", "prediction", "presence_penalty", "prompt"),
    *("reasoning", "reasoning_effort", "response_format", "store", "suffix", "text", "top_logprobs", "truncation"),
    *("user", "verbosity", "web_search_options", "container", "mcp_servers", "output_format", "thinking"),
]
"""Read by no route, and known to some of them as harmless or as refused."""


def words_in(value: Any) -> set[str]:
    """Keys and texts, so that what is drawn at random is nearly right."""
    if isinstance(value, dict):
        return set().union(*({key} | words_in(one) for key, one in value.items()))
    if isinstance(value, list):
        return set().union(*map(words_in, value))
    return {value} if isinstance(value, str) else set()


WORDS = sorted(
    words_in([good for _, _, good in ROUTES]) | {"image_url", "input_image", "url", "system", "auto", "image", "none"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*WORDS, "{}", "", "\ud800"])
    | st.text(max_size=5)
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=25,
)


@pytest.mark.parametrize(("parse", "fields", "good"), ROUTES, ids=NAMES)
@settings(max_examples=80)
@given(data=st.data())
def test_any_body(parse: Parse, fields: Any, good: dict[str, Any], data: st.DataObject) -> None:
    known = sorted({*fields.model_fields, *OTHER_FIELDS})
    more = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=6), ANY_JSON, max_size=4))
    check(parse, data.draw(st.sampled_from([{**good, **more}, more, *more.values(), None])))


@pytest.mark.parametrize(("parse", "fields", "good"), ROUTES, ids=NAMES)
@settings(max_examples=120)
@given(data=st.data())
def test_a_good_body_with_one_place_changed(
    parse: Parse, fields: Any, good: dict[str, Any], data: st.DataObject
) -> None:
    body = json.loads(json.dumps(good))
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ANY_JSON)
    check(parse, body)


def check(parse: Parse, body: Any) -> None:
    ask = refusal = None
    try:
        ask = parse(body)
    except InvalidRequest as error:
        refusal = error
    if ask:
        json.dumps([ask.messages, ask.tools, ask.prompt, ask.sampling], ensure_ascii=False, allow_nan=False).encode()
    if refusal:
        assert str(refusal)
        assert refusal.field or not isinstance(body, dict)
        json.dumps(refusal_of(refusal).body, ensure_ascii=False).encode()
        json.dumps(anthropic_error_body(400, str(refusal)), ensure_ascii=False).encode()
