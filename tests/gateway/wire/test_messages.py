"""/v1/messages: blocks become the messages that the same conversation has in chat; what is not exact is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.wire.messages import parse_count_tokens, parse_messages
from penstock.gateway.wire.thinking_blocks import divide
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "What is 1+2?"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def ask_for(**fields: Any) -> CompletionRequest:
    return parse_messages({"model": "tiny", "max_tokens": 9, "messages": [USER], **fields})


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_sampling_of_a_request() -> None:
    ask = ask_for(temperature=0, top_k=3, stop_sequences=["a", "b"], stream=True)
    assert ask.sampling == {"temperature": 0, "top_k": 3, "max_new_tokens": 9}
    assert (ask.stop, ask.stream, ask.n, ask.limit_is_bound, ask.api) == (("a", "b"), True, 1, True, "messages")


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
    assert ask_for(system=[text("Be brief.", **CACHED), text("\nNow.")], messages=turns).messages == (
        {"role": "system", "content": "Be brief.\nNow."},
        {"role": "user", "content": "1+2?"},
        {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call("c1", a=1), call("c2", b=[2.0])]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "bad", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3")]},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": ""},
        USER,
    )


def test_system_as_text_and_accounting_of_claude_code() -> None:
    assert ask_for(system="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    billed = [text("x-anthropic-billing-header: cc_version=2.1.197.f00"), text("Be brief.")]
    assert ask_for(system=billed).messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("words", ["<think>\nhm\n</think>\n\nyes\n", "hm</think>yes", " <think></think>", "yes"])
def test_our_thinking_comes_back_as_the_text_it_was(words: str, inside: bool) -> None:
    parts = divide(words, inside=inside)
    blocks = [] if parts.thinking is None else [thought(parts.thinking, parts.signature)]
    blocks += [text(parts.text)] if parts.text else []
    (message, _) = ask_for(messages=[turn("assistant", *blocks), USER]).messages
    assert message == {"role": "assistant", "content": words}


def thought(words: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": signature}


@pytest.mark.parametrize("signature", ["", "EqQBCkgI", "penstock.", "penstock.!!", "penstock.WzFd", "penstock.W10="])
def test_thinking_of_another_model_goes_to_the_template(signature: str) -> None:
    blocks = [thought("hm", signature), {"type": "redacted_thinking", "data": "x"}, text("yes")]
    (message, _) = ask_for(messages=[turn("assistant", *blocks), USER]).messages
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_tools_have_the_shape_that_templates_take() -> None:
    tool = {**ADD, "type": "custom", "strict": True, "eager_input_streaming": True, "defer_loading": False, **CACHED}
    ask = ask_for(tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    assert ask.tools == ({"type": "function", "function": function},)
    assert (ask.tool_choice, ask.parallel_tool_calls, ask.reads_calls) == ("auto", False, True)
    assert ask_for(tools=[ADD], tool_choice={"type": "none"}).reads_calls is False


HARMLESS = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    **CACHED,
}


def test_what_changes_no_token_is_ignored() -> None:
    assert ask_for(**HARMLESS) == ask_for()


@pytest.mark.parametrize(
    "source", [{"type": "base64", "media_type": "image/png", "data": "AA=="}, {"type": "url", "url": "u"}]
)
def test_images_only_where_the_model_takes_them(source: dict[str, str]) -> None:
    image = {"type": "image", "source": source}
    body = {"model": "tiny", "max_tokens": 9, "messages": [turn("user", text("x"), image)]}
    (message,) = parse_messages(body, images=True).messages
    url = source.get("url") or "data:image/png;base64,AA=="
    assert message["content"] == [{"type": "text", "text": "x"}, {"type": "image", "url": url}]


def test_the_prompt_to_count_is_the_prompt_to_answer() -> None:
    fields = {"system": "Be brief.", "tools": [ADD], "tool_choice": {"type": "none"}, **HARMLESS}
    counted = parse_count_tokens({"model": "tiny", "messages": [USER], "max_tokens": 5, **fields})
    asked = ask_for(**fields)
    assert (counted.messages, counted.tools, counted.api) == (asked.messages, asked.tools, asked.api)
    with pytest.raises(InvalidRequest) as error:
        parse_count_tokens({"model": "tiny", "messages": [USER], "nonsense": 1})
    assert error.value.field == "nonsense"
