"""/v1/chat/completions: every field is used, known to be harmless, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.chat import parse_chat
from penstock.gateway.wire.types import CompletionRequest

USER = {"role": "user", "content": "What is 1+2?"}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"default": None}}}}


def ask_for(**fields: Any) -> CompletionRequest:
    return parse_chat({"model": "tiny", "messages": [USER], **fields})


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


def test_text_parts_are_joined_exactly_and_developer_reads_as_system() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": " b\n"}]
    ask = ask_for(messages=[{"role": "developer", "content": parts}, {**USER, "name": "Ann"}])
    assert ask.messages == ({"role": "system", "content": "a  b\n"}, {**USER, "name": "Ann"})


def test_images_only_where_the_model_takes_them() -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
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
