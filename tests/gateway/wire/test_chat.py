"""/v1/chat/completions: every field is used, known to be harmless, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.chat import parse_chat
from penstock.gateway.wire.completions import parse_completion
from penstock.gateway.wire.responses import parse_response
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest

USER = {"role": "user", "content": "What is 1+2?"}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}


def ask_for(**fields: Any) -> CompletionRequest:
    return parse_chat({"model": "tiny", "messages": [USER], **fields})


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        ask_for(**fields)
    return error.value


def test_everything_that_is_used() -> None:
    ask = ask_for(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        seed=7,
        max_completion_tokens=99,
        stop=["a", "b"],
        n=3,
        logprobs=True,
        tools=[{"type": "function", "function": {"strict": True, "parameters": ADD["parameters"], **ADD}}],
        tool_choice="none",
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert ask == CompletionRequest(
        api="chat",
        model="tiny",
        messages=(USER,),
        tools=({"type": "function", "function": ADD},),
        tool_choice="none",
        parallel_tool_calls=False,
        n=3,
        sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "max_new_tokens": 99},
        stop=("a", "b"),
        logprobs=True,
        stream=True,
        include_usage=True,
    )
    assert list(ask.tools[0]["function"]) == ["name", "description", "parameters"], "as BaseTool.schema orders them"


def test_what_is_not_said_leaves_the_runs_own_sampling() -> None:
    assert ask_for() == CompletionRequest(api="chat", model="tiny", messages=(USER,))
    assert ask_for(temperature=None, max_tokens=None, stop=None, tools=None, n=None, logit_bias=None) == ask_for()


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": "b"}},
        {"store": True},
        {"user": "u"},
        {"safety_identifier": "s"},
        {"service_tier": "auto"},
        {"prompt_cache_key": "k"},
        {"prediction": {"type": "content", "content": "x"}},
        {"stream_options": {"include_obfuscation": False}},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"min_p": 0, "repetition_penalty": 1.0},
        {"top_logprobs": 0},
        {"tool_choice": "auto"},
    ],
    ids=str,
)
def test_what_leaves_the_tokens_alone_is_taken(field: dict[str, Any]) -> None:
    assert ask_for(**field) == ask_for()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("reasoning_effort", "low"),
        ("top_logprobs", 1),
        ("top_logprobs", False),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ],
    ids=str,
)
def test_what_would_change_them_is_refused(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert (error.field, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
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
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls.0.function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "body": 1}}]}, "tools.0.function.body"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools.1"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_as_the_client_wrote_it(fields: dict[str, Any], name: str) -> None:
    assert refused(**fields).field == name


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    error = refused(temprature=1)
    assert (error.field, error.code) == ("temprature", "unknown_parameter")
    assert "did you mean 'temperature'?" in error.message


@pytest.mark.parametrize("body", [None, [], "text", 3, {}], ids=str)
def test_a_body_that_is_no_request(body: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)


def test_bottomless_nesting_is_refused() -> None:
    nested: Any = {}
    for _ in range(5000):
        nested = {"a": nested}
    assert refused(metadata=nested).field.startswith("metadata")


def test_text_parts_are_joined_exactly_and_developer_reads_as_system() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": " b\n"}]
    ask = ask_for(messages=[{"role": "developer", "content": parts}, {**USER, "name": "Ann"}])
    assert ask.messages == ({"role": "system", "content": "a  b\n"}, {**USER, "name": "Ann"})


def test_images_only_where_the_model_takes_them() -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    assert refused(messages=body["messages"]).field == "messages.0.content.1"
    (message,) = parse_chat(body, images=True).messages
    assert message["content"] == [{"type": "text", "text": "What?"}, {"type": "image", "url": "data:x"}]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("{}", {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("", ""),
    ],
)
def test_arguments_are_an_object_for_the_template_where_they_are_one(text: str, plain: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": text}}
    ask = ask_for(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert ask.messages[1]["content"] == ""
    assert ask.messages[1]["tool_calls"][0]["function"]["arguments"] == plain


def test_an_answer_as_the_openai_package_dumps_it_is_taken() -> None:
    dumped = {
        "role": "assistant",
        "content": "3",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    assert ask_for(messages=[USER, dumped, USER]).messages[1] == {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("parse", "field", "value", "words"),
    [
        (parse_chat, "stop", list("abcde"), "at most 4 items, not 5"),
        (parse_chat, "top_logprobs", 5, "the sampled token's log-probability alone"),
        (parse_chat, "response_format", {"type": "json_object"}, "sampling is not constrained"),
        (parse_chat, "logit_bias", {"5": 1}, "another distribution"),
        (parse_chat, "min_p", 0.1, "another distribution"),
        (parse_chat, "repetition_penalty", 1.1, "another distribution"),
        (parse_chat, "tool_choice", "required", "'required' is not supported here: sampling is not constrained"),
        (parse_completion, "logprobs", 5, "the sampled token's log-probability alone"),
        (parse_completion, "suffix", "x", "no text is inserted"),
        (parse_response, "background", True, "no answer is kept running"),
    ],
)
def test_refusal_names_the_reason(parse: Any, field: str, value: Any, words: str) -> None:
    bodies = {parse_chat: {"messages": [{"role": "user", "content": "x"}]}, parse_completion: {"prompt": "x"}}
    with pytest.raises(InvalidRequest, match=words) as refused:
        parse({"model": "m", **bodies.get(parse, {"input": "x"}), field: value})
    assert refused.value.field == field
