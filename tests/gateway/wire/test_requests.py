"""Bodies of the four wires become one `CompletionRequest`: each field is used or known to be harmless, and the same
conversation has the same messages everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.chat import parse_chat
from penstock.gateway.wire.completions import parse_completion
from penstock.gateway.wire.messages import parse_count_tokens, parse_messages
from penstock.gateway.wire.responses import parse_response
from penstock.gateway.wire.thinking_blocks import divide
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest

USER = {"role": "user", "content": "What is 1+2?"}
SCHEMA = {"type": "object", "properties": {"a": {"default": None}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": ADD}
CUSTOM = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral"}}


def chat(**fields: Any) -> CompletionRequest:
    return parse_chat({"model": "tiny", "messages": [USER], **fields})


def response(**fields: Any) -> CompletionRequest:
    return parse_response({"model": "tiny", "input": "What is 1+2?", **fields})


def message(**fields: Any) -> CompletionRequest:
    return parse_messages({"model": "tiny", "max_tokens": 9, "messages": [USER], **fields})


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


# chat ----------------------------------------------------------------------------------------------------------------
def test_chat_uses_every_field() -> None:
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        seed=7,
        max_completion_tokens=99,
        stop=["a", "b"],
        n=3,
        logprobs=True,
        tools=[{"type": "function", "function": {"strict": True, "parameters": SCHEMA, **ADD}}],
        tool_choice="none",
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert request == CompletionRequest(
        api="chat",
        model="tiny",
        messages=(USER,),
        tools=(TOOL,),
        tool_choice="none",
        parallel_tool_calls=False,
        n=3,
        sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "max_new_tokens": 99},
        stop=("a", "b"),
        logprobs=True,
        stream=True,
        include_usage=True,
    )
    assert list(request.tools[0]["function"]) == ["name", "description", "parameters"], "as BaseTool.schema orders them"
    assert chat() == CompletionRequest(api="chat", model="tiny", messages=(USER,)), "the run's own sampling"


HARMLESS_IN_CHAT: list[dict[str, Any]] = [
    {"temperature": None, "max_tokens": None, "stop": None, "tools": None, "n": None, "logit_bias": None},
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
]
HARMLESS_IN_MESSAGES: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    **CACHED,
}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [*((chat, one) for one in HARMLESS_IN_CHAT), (message, HARMLESS_IN_MESSAGES)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_field_that_changes_no_token_is_ignored(parse: Any, fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_chat_joins_text_parts_exactly_and_reads_developer_as_system() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": " b\n"}]
    request = chat(messages=[{"role": "developer", "content": parts}, {**USER, "name": "Ann"}])
    assert request.messages == ({"role": "system", "content": "a  b\n"}, {**USER, "name": "Ann"})


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
def test_chat_arguments_are_an_object_for_the_template_where_they_are_one(text: str, plain: Any) -> None:
    request = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call("c1", text)]}])
    assert request.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call("c1", plain)]}


def test_chat_takes_an_answer_as_the_openai_package_dumps_it() -> None:
    absent = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    dumped = {"role": "assistant", "content": "3", **absent}
    assert chat(messages=[USER, dumped, USER]).messages[1] == {"role": "assistant", "content": "3"}


# completions ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sent", "prompt"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2, 3], (1, 2, 3)), ([[1, 2, 3]], (1, 2, 3))],
)
def test_one_prompt_as_text_or_exact_ids(sent: Any, prompt: Any) -> None:
    request = parse_completion({"model": "tiny", "prompt": sent, "max_tokens": 5, "echo": False, "best_of": 2, "n": 2})
    assert (request.prompt, request.n, request.sampling) == (prompt, 2, {"max_new_tokens": 5})
    assert not request.reads_calls


@pytest.mark.parametrize(("number", "asked"), [(None, False), (0, True), (1, True)])
def test_logprobs_are_asked_for_by_number(number: Any, asked: bool) -> None:
    assert parse_completion({"model": "tiny", "prompt": "x", "logprobs": number}).logprobs is asked


# responses -----------------------------------------------------------------------------------------------------------
def test_response_input_as_text_is_one_user_message() -> None:
    request = response(instructions="Be brief.", max_output_tokens=9, temperature=0, previous_response_id="resp_1")
    assert request.messages == ({"role": "user", "content": "What is 1+2?"},)
    assert (request.instructions, request.previous_response_id) == ("Be brief.", "resp_1")
    assert request.sampling == {"temperature": 0, "max_new_tokens": 9}


def test_response_items_are_the_messages_of_a_chat() -> None:
    output = [{"type": "output_text", "text": "Let me.", "annotations": [], "logprobs": []}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": output,
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad"}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
    ]
    assert response(input=items).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call("c1", {"a": 1}), call("c2", "{")]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "bad", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", {})]},
    )


def test_response_tools_have_the_shape_that_templates_take_and_are_repeated() -> None:
    request = response(tools=[{"type": "function", "strict": True, **ADD}], parallel_tool_calls=False)
    assert request.tools == (TOOL,)
    assert request.echo["tools"] == [{"type": "function", "strict": True, **ADD}]
    assert (request.parallel_tool_calls, request.echo["parallel_tool_calls"]) == (False, False)


def test_response_may_add_nothing_to_an_earlier_one() -> None:
    assert response(input=[], previous_response_id="resp_1").messages == ()


# messages ------------------------------------------------------------------------------------------------------------
def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_message_has_its_sampling() -> None:
    request = message(temperature=0, top_k=3, stop_sequences=["a", "b"], stream=True)
    assert request.sampling == {"temperature": 0, "top_k": 3, "max_new_tokens": 9}
    assert (request.stop, request.stream, request.n, request.limit_is_bound, request.api) == (
        ("a", "b"),
        True,
        1,
        True,
        "messages",
    )


def test_blocks_are_the_messages_of_a_chat() -> None:
    turns = [
        turn("user", text("1+2"), text("?", **CACHED)),
        {"role": "system", "content": "Agents: none."},
        turn("assistant", text("Let me."), use("c1", a=1), use("c2", b=[2.0])),
        turn("user", result("c1", "3", is_error=False), result("c2", [text("b"), text("ad")], is_error=True, **CACHED)),
        turn("assistant", use("c3")),
        turn("user", {"type": "tool_result", "tool_use_id": "c3"}, text("Go on.")),
        turn("assistant"),
        USER,
    ]
    assert message(system=[text("Be brief.", **CACHED), text("\nNow.")], messages=turns).messages == (
        {"role": "system", "content": "Be brief.\nNow."},
        {"role": "user", "content": "1+2?"},
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call("c1", {"a": 1}), call("c2", {"b": [2.0]})]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "bad", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", {})]},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": ""},
        USER,
    )


def test_system_as_text_and_accounting_of_claude_code() -> None:
    assert message(system="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    billed = [text("x-anthropic-billing-header: cc_version=2.1.197.f00"), text("Be brief.")]
    assert message(system=billed).messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("words", ["<think>\nhm\n</think>\n\nyes\n", "hm</think>yes", " <think></think>", "yes"])
def test_our_thinking_comes_back_as_the_text_it_was(words: str, inside: bool) -> None:
    parts = divide(words, inside=inside)
    blocks = [] if parts.thinking is None else [thought(parts.thinking, parts.signature)]
    blocks += [text(parts.text)] if parts.text else []
    (found, _) = message(messages=[turn("assistant", *blocks), USER]).messages
    assert found == {"role": "assistant", "content": words}


def thought(words: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": signature}


@pytest.mark.parametrize("signature", ["", "EqQBCkgI", "penstock.", "penstock.!!", "penstock.WzFd", "penstock.W10="])
def test_thinking_of_another_model_goes_to_the_template(signature: str) -> None:
    blocks = [thought("hm", signature), {"type": "redacted_thinking", "data": "x"}, text("yes")]
    (found, _) = message(messages=[turn("assistant", *blocks), USER]).messages
    assert found == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_message_tools_have_the_shape_that_templates_take() -> None:
    tool = {**CUSTOM, "type": "custom", "strict": True, "eager_input_streaming": True, "defer_loading": False, **CACHED}
    request = message(tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert request.tools == (TOOL,)
    assert (request.tool_choice, request.parallel_tool_calls, request.reads_calls) == ("auto", False, True)
    assert message(tools=[CUSTOM], tool_choice={"type": "none"}).reads_calls is False


def test_the_prompt_to_count_is_the_prompt_to_answer() -> None:
    fields = {"system": "Be brief.", "tools": [CUSTOM], "tool_choice": {"type": "none"}, **HARMLESS_IN_MESSAGES}
    counted = parse_count_tokens({"model": "tiny", "messages": [USER], "max_tokens": 5, **fields})
    asked = message(**fields)
    assert (counted.messages, counted.tools, counted.api) == (asked.messages, asked.tools, asked.api)
    with pytest.raises(InvalidRequest) as error:
        parse_count_tokens({"model": "tiny", "messages": [USER], "nonsense": 1})
    assert error.value.field == "nonsense"
