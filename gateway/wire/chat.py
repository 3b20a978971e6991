"""The body of POST /v1/chat/completions → `Ask`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.gateway.wire.check import Fields, Wire
from penstock.gateway.wire.common import (
    HARMLESS,
    PENALTIES,
    ChoicesBody,
    Count,
    Function,
    ToolChoice,
    check_names,
    check_tool_choice,
    sampling_of,
    tool_schema,
)
from penstock.gateway.wire.messages import MessageIn, plain_message
from penstock.gateway.wire.types import Ask, BadAsk


class Tool(Wire):
    type: Literal["function"]
    function: Function


class ChatBody(ChoicesBody):
    """What is used of a chat request; for routes to declare in OpenAPI."""

    messages: list[MessageIn] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


FIELDS = Fields(
    ChatBody,
    harmless=HARMLESS | {"prediction"},
    refused=PENALTIES
    | {
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "audio": (),
        "moderation": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    },
)


def parse_chat(body: Any, *, images: bool = False) -> Ask:
    """Raises `BadAsk` naming what is wrong or cannot be given. `images`: the model takes image parts."""
    chat = FIELDS.read(body)
    functions = [tool.function for tool in chat.tools or []]
    check_names(functions)
    check_tool_choice(chat.tool_choice)
    messages = tuple(plain_message(one, f"messages.{i}", images=images) for i, one in enumerate(chat.messages))
    return Ask(
        api="chat",
        model=chat.model,
        messages=messages,
        tools=tuple(tool_schema(function) for function in functions),
        tool_choice=chat.tool_choice or "auto",
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        n=chat.n or 1,
        sampling=sampling_of(chat, _max_new_tokens(chat)),
        stop=chat.stops,
        logprobs=bool(chat.logprobs),
        stream=bool(chat.stream),
        include_usage=chat.wants_usage,
    )


def _max_new_tokens(chat: ChatBody) -> int | None:
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise BadAsk("max_tokens", "differs from max_completion_tokens; it is its old name", "invalid_value")
    return chat.max_completion_tokens or chat.max_tokens
