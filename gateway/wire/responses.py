"""/v1/responses: the body → `CompletionRequest`, a `Choice` → the ``response`` object. Streams: `responses_stream.py`.

Input items become messages for the chat template. A call is an item, part of the assistant's message before it:

    message(assistant) · function_call · function_call · function_call_output
    └──────────── one assistant message ────────────┘   └─── tool message ──┘


The answer has one message, then one item per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.gateway.wire.answers import token_logprobs
from penstock.gateway.wire.chat import arguments_text, plain_call
from penstock.gateway.wire.schema import (
    HARMLESS,
    NOT_HERE,
    NOT_THE_MODELS,
    ONE_LOGPROB,
    TEXT_ONLY,
    UNCONSTRAINED,
    BodyFields,
    Count,
    Function,
    SamplingBody,
    StreamOptions,
    TextContent,
    ToolChoice,
    UnsupportedField,
    WireModel,
    check_names,
    check_tool_choice,
    plain_content,
    sampling_of,
    tool_schema,
)
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, InvalidRequest, SampledToken, item_id
from penstock.tools.parsers import ToolCall

Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(TextContent):
    type: Literal["input_text", "output_text", "text"]
    annotations: Any = None
    """Ignored, as the next two."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class ImageItemPart(WireModel):
    """An image, which `plain_content` refuses."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    """Ignored."""


ItemPart = Annotated[TextItemPart | ImageItemPart, Field(discriminator="type")]


class MessageItem(WireModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    id: str | None = None
    """Ignored, as the next two."""
    status: Status | None = None
    phase: str | None = None


class CallItem(WireModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    """Ignored, as the next one."""
    status: Status | None = None


class OutputItem(WireModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemPart]
    id: str | None = None
    """Ignored, as the next one."""
    status: Status | None = None


class ReasoningItem(WireModel):
    """Ignored: answers here have none, and another model's reasoning is not this one's."""

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


def plain_items(items: Sequence[Item]) -> tuple[dict[str, Any], ...]:
    """Messages as a chat template takes them. Raises `InvalidRequest` for an image."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": plain_content(item.content, f"input.{i}.content")})
        elif isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(plain_call(item.call_id, item.name, item.arguments))
        elif isinstance(item, OutputItem):
            content = plain_content(item.output, f"input.{i}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    return tuple(messages)


LOGPROBS = "message.output_text.logprobs"


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
"""OpenAI's own bounds: the journal keeps what an answer repeats."""


class FunctionTool(Function):
    """Tools that OpenAI runs itself (search, files, computers) are refused."""

    type: Literal["function"]


class ResponseBody(SamplingBody):
    """Fields of a request that are used; also its OpenAPI schema."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = Field(None, description=f"{LOGPROBS} is used, the others have no meaning here.")
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    user: MetadataValue | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None


FIELDS = BodyFields(
    ResponseBody,
    harmless=HARMLESS - {"store"} | {"client_metadata", "max_tool_calls"},
    refused={
        "background": UnsupportedField("no answer is kept running for a later request", (False,)),
        "context_management": UnsupportedField("contexts only grow", ([],)),
        "conversation": UnsupportedField("no conversations are stored; use previous_response_id"),
        "access_programs": UnsupportedField(NOT_HERE),
        "image": UnsupportedField(TEXT_ONLY),
        "moderation": UnsupportedField(NOT_HERE),
        "prompt": UnsupportedField("no prompts are stored"),
        "reasoning": UnsupportedField(
            NOT_THE_MODELS, ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None})
        ),
        "text": UnsupportedField(UNCONSTRAINED, ({}, {"format": {"type": "text"}})),
        "top_logprobs": UnsupportedField(ONE_LOGPROB, (0,)),
        "truncation": UnsupportedField("contexts only grow", ("disabled",)),
    },
)


def parse_response(body: Any) -> CompletionRequest:
    """Raises `InvalidRequest` naming the field.

    `messages` of the result are this request's alone; the caller adds those of `previous_response_id` before them, and
    `instructions`, as a system message, before all.
    """
    request = FIELDS.read(body)
    tools = request.tools or []
    check_names(tools)
    check_tool_choice(request.tool_choice)
    repeated = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")
    return CompletionRequest(
        api="responses",
        model=request.model,
        messages=_messages(request),
        tools=tuple(tool_schema(tool) for tool in tools),
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        sampling=sampling_of(request, request.max_output_tokens),
        logprobs=LOGPROBS in (request.include or []),
        stream=bool(request.stream),
        include_usage=True,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        stored=request.store is not False,
        echo={
            **{name: getattr(request, name) for name in repeated},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in tools],
        },
    )


def parse_input_tokens(body: Any, model: str) -> CompletionRequest:
    """The request whose prompt is to be counted; all fields may be absent. Raises `InvalidRequest` naming the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("", "the body must be a JSON object")
    present = {name: value for name, value in body.items() if value is not None and name != "personality"}
    return parse_response({"model": model, "input": "", **present})


def _messages(request: ResponseBody) -> tuple[dict[str, Any], ...]:
    if isinstance(request.input, str):
        return ({"role": "user", "content": request.input},)
    messages = plain_items(request.input)
    if not messages and request.previous_response_id is None:
        raise InvalidRequest("input", "it has no messages", "invalid_value")
    return messages


def response_body(request: CompletionRequest, head: AnswerHead, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer. The API has no `n`: there is one choice."""
    (choice,) = choices
    cut = choice.finish_reason == "length"
    return {
        **opening_body(request, head, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(head, choice),
        "usage": _usage(head, choice),
    }


def opening_body(request: CompletionRequest, head: AnswerHead, status: str = "in_progress") -> dict[str, Any]:
    """The ``response`` without output."""
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "model": head.model,
        "error": None,
        "incomplete_details": None,
        "output": [],
        **request.echo,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": None,
    }


def output_items(head: AnswerHead, choice: Choice) -> list[dict[str, Any]]:
    """A message, left out if there are calls and no text, then the calls."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    message = [message_item(head, [output_text(choice.content, choice.tokens)], status)]
    shown = message if choice.content or not choice.calls else []
    return shown + [call_item(head, call, i) for i, call in enumerate(choice.calls)]


def message_item(head: AnswerHead, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The one message of an answer."""
    item = item_id("msg", head.answer_id, 0)
    return {"id": item, "type": "message", "role": "assistant", "status": status, "content": content}


def output_text(text: str, tokens: Sequence[SampledToken] = ()) -> dict[str, Any]:
    """`tokens` are empty where no log-probabilities were requested."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(tokens)}


def call_item(head: AnswerHead, call: ToolCall, position: int, status: str = "completed") -> dict[str, Any]:
    """A call; without its arguments while it is ``in_progress``."""
    return {
        "id": item_id("fc", head.answer_id, position),
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": arguments_text(call) if status == "completed" else "",
        "status": status,
    }


def _usage(head: AnswerHead, choice: Choice) -> dict[str, Any]:
    sampled = len(choice.token_ids)
    return {
        "input_tokens": head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": head.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": head.prompt_tokens + sampled,
    }
