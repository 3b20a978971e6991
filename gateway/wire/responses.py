"""Input items of /v1/responses, and the plain messages that a chat template takes.

A call is an item of its own there. In a conversation it belongs to the assistant's message before it:

    message(assistant) · function_call · function_call · function_call_output
    └──────────── one assistant message ────────────┘   └─── tool message ──┘

The body of POST /v1/responses → `Ask`.

A `Choice` → the ``response`` object of /v1/responses: one message, then one item per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.gateway.wire.chat import arguments_text, plain_call
from penstock.gateway.wire.schema import (
    HARMLESS,
    ContentPart,
    Count,
    Fields,
    Function,
    SamplingBody,
    StreamOptions,
    ToolChoice,
    Wire,
    check_names,
    check_tool_choice,
    image_part,
    plain_content,
    sampling_of,
    text_part,
    tool_schema,
)
from penstock.gateway.wire.types import Ask, BadAsk, Choice, Head, Token, item_id
from penstock.tools.parsers import ToolCall

Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(ContentPart):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    """Taken and dropped, as the next two."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None

    @property
    def plain(self) -> dict[str, str]:
        return text_part(self.text)


class ImageItemPart(ContentPart):
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    """Taken and dropped."""

    @property
    def plain(self) -> dict[str, str]:
        return image_part(self.image_url)


ItemPart = Annotated[TextItemPart | ImageItemPart, Field(discriminator="type")]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    id: str | None = None
    """Taken and dropped, as the next two."""
    status: Status | None = None
    phase: str | None = None


class CallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    """Taken and dropped, as the next one."""
    status: Status | None = None


class OutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemPart]
    id: str | None = None
    """Taken and dropped, as the next one."""
    status: Status | None = None


class ReasoningItem(Wire):
    """Taken and dropped: answers here have none, another model's thoughts are not this one's."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def plain_items(items: Sequence[Item], *, images: bool = False) -> tuple[dict[str, Any], ...]:
    """Messages as a chat template takes them. Raises `BadAsk` for an image that is not allowed."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        if isinstance(item, MessageItem):
            messages.append(_plain_message(item, f"input.{i}.content", images))
        elif isinstance(item, CallItem):
            _add_call(messages, item)
        elif isinstance(item, OutputItem):
            content = plain_content(item.output, f"input.{i}.output", images)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    return tuple(messages)


def _plain_message(item: MessageItem, where: str, images: bool) -> dict[str, Any]:
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": plain_content(item.content, where, images)}


def _add_call(messages: list[dict[str, Any]], item: CallItem) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append(plain_call(item.call_id, item.name, item.arguments))


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


def response_body(ask: Ask, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer. The API knows no `n`: there is one choice."""
    (choice,) = choices
    cut = choice.finish_reason == "length"
    return {
        **opening_body(ask, head, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(head, choice),
        "usage": _usage(head, choice),
    }


def opening_body(ask: Ask, head: Head, status: str = "in_progress") -> dict[str, Any]:
    """The ``response`` with no output yet."""
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "model": head.model,
        "error": None,
        "incomplete_details": None,
        "output": [],
        **ask.echo,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": None,
    }


def output_items(head: Head, choice: Choice) -> list[dict[str, Any]]:
    """A message, left out where there are calls and no text, then the calls."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    message = [message_item(head, [output_text(choice.content, choice.tokens)], status)]
    shown = message if choice.content or not choice.calls else []
    return shown + [call_item(head, call, i) for i, call in enumerate(choice.calls)]


def message_item(head: Head, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The one message of an answer."""
    item = item_id("msg", head.answer_id, 0)
    return {"id": item, "type": "message", "role": "assistant", "status": status, "content": content}


def output_text(text: str, tokens: Sequence[Token] = ()) -> dict[str, Any]:
    """`tokens` are empty where no log-probabilities were asked for."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(tokens)}


def call_item(head: Head, call: ToolCall, position: int, status: str = "completed") -> dict[str, Any]:
    """A call; without its arguments while it is ``in_progress``."""
    return {
        "id": item_id("fc", head.answer_id, position),
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": arguments_text(call) if status == "completed" else "",
        "status": status,
    }


def token_logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """`top_logprobs` is empty: only the sampled token's is known."""
    return [{"token": one.text, "bytes": list(one.raw), "logprob": one.logprob, "top_logprobs": []} for one in tokens]


def _usage(head: Head, choice: Choice) -> dict[str, Any]:
    sampled = len(choice.token_ids)
    return {
        "input_tokens": head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": head.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": head.prompt_tokens + sampled,
    }
