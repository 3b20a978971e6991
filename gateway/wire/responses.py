"""The body of POST /v1/responses → `Ask`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.gateway.wire.check import Fields
from penstock.gateway.wire.common import (
    HARMLESS,
    Count,
    Function,
    SamplingBody,
    StreamOptions,
    ToolChoice,
    check_names,
    check_tool_choice,
    sampling_of,
    tool_schema,
)
from penstock.gateway.wire.response_items import Item, plain_items
from penstock.gateway.wire.types import Ask, BadAsk

LOGPROBS = "message.output_text.logprobs"
ECHOED = ["instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user"]


class FunctionTool(Function):
    """Tools that OpenAI runs itself (search, files, computers) are refused: there is none of them here."""

    type: Literal["function"]


class ResponseBody(SamplingBody):
    """What is used of a request; for routes to declare in OpenAPI."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = Field(None, description=f"{LOGPROBS} is used, the others have no meaning here.")
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream_options: StreamOptions | None = None


FIELDS = Fields(
    ResponseBody,
    harmless=HARMLESS | {"max_tool_calls"},
    refused={
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "access_programs": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
        "text": ({}, {"format": {"type": "text"}}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
)


def parse_response(body: Any, *, images: bool = False) -> Ask:
    """Raises `BadAsk` naming what is wrong or cannot be given.

    `Ask.messages` are this request's alone; the caller puts those of `previous_response_id` before them and
    `instructions`, as a system message, before all.
    """
    asked = FIELDS.read(body)
    tools = asked.tools or []
    check_names(tools)
    check_tool_choice(asked.tool_choice)
    return Ask(
        api="responses",
        model=asked.model,
        messages=_messages(asked, images),
        tools=tuple(tool_schema(tool) for tool in tools),
        tool_choice=asked.tool_choice or "auto",
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        sampling=sampling_of(asked, asked.max_output_tokens),
        logprobs=LOGPROBS in (asked.include or []),
        stream=bool(asked.stream),
        include_usage=True,
        instructions=asked.instructions,
        previous_response_id=asked.previous_response_id,
        echo=_echo(asked),
    )


def _messages(asked: ResponseBody, images: bool) -> tuple[dict[str, Any], ...]:
    if isinstance(asked.input, str):
        return ({"role": "user", "content": asked.input},)
    messages = plain_items(asked.input, images=images)
    if not messages and asked.previous_response_id is None:
        raise BadAsk("input", "there is no message in it", "invalid_value")
    return messages


def _echo(asked: ResponseBody) -> dict[str, Any]:
    """Fields that a ``response`` repeats, with the values that hold where they were not given."""
    return {
        **{name: getattr(asked, name) for name in ECHOED},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": asked.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in asked.tools or []],
    }
