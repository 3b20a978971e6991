"""Bodies of answers: their OpenAPI models, models lists, errors, and server-sent events.

Answers are built as dicts, without the models.

"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.wire.types import InvalidRequest


class Shape(BaseModel):
    """Without extra fields: tests fail for a field that is sent and not declared."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(Shape):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Any] = Field(max_length=0)


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCallBody(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] = []


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(Shape):
    """`chat_body`"""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Shape):
    """`completion_body`"""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TokenLogprob]


class OutputMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["completed"]


class InputDetails(CachedTokens):
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseTool(Shape):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseAnswer(Shape):
    """`response_body`"""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[Annotated[OutputMessage | OutputCall, Field(discriminator="type")]]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    previous_response_id: str | None
    temperature: float | None
    top_p: float | None
    user: str | None
    parallel_tool_calls: bool
    tool_choice: Literal["auto", "none"]
    tools: list[ResponseTool]
    truncation: Literal["disabled"]
    text: dict[str, Any]
    usage: ResponseUsage


class ModelAnswer(BaseModel):
    """`model_body`, with further fields."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelListAnswer(Shape):
    """`model_list_body`"""

    object: Literal["list"]
    data: list[ModelAnswer]


OWNER = "penstock"


def model_body(model: str, created_s: int, **more: Any) -> dict[str, Any]:
    """One model. `more` are further fields, such as ``max_model_len`` and ``version``; clients keep and ignore them."""
    return {"id": model, "object": "model", "created": created_s, "owned_by": OWNER, **more}


def model_list_body(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of `model_body`s."""
    return {"object": "list", "data": models}


_TYPES = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    409: ("conflict_error", "conflict"),
    410: ("invalid_request_error", "gone"),
    413: ("invalid_request_error", "too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "overloaded"),
}
"""HTTP status → (type, code). The `openai` package raises its exceptions by status and retries 409, 429 and 5xx."""


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None = None
    """The wrong field, as the client wrote it: ``messages.0.content``."""
    code: str | None = None


class OpenAIErrorBody(BaseModel):
    """``{"error": {"message", "type", "param", "code"}}``, the shape that OpenAI clients read."""

    error: OpenAIError


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Body of an error; statuses that are not in the table are treated as 400 or 500."""
    kind, usual = _TYPES.get(status) or _TYPES[400 if status < 500 else 500]
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


def invalid_request_body(error: InvalidRequest) -> dict[str, Any]:
    """Body of the 400 for an invalid request."""
    return error_body(400, str(error), error.field or None, error.code)


SSE_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies keep the connection open."""


def sse_data(body: Mapping[str, Any]) -> bytes:
    """One unnamed event, as chat and completions send them."""
    return b"data: " + _ascii_json(body) + b"\n\n"


def sse_event(body: Mapping[str, Any]) -> bytes:
    """One event named by its ``type``, as the Responses API sends them."""
    return f"event: {body['type']}\n".encode() + sse_data(body)


def _ascii_json(body: Mapping[str, Any]) -> bytes:
    """ASCII only: a line separator in a text must not end the event."""
    return json.dumps(body, separators=(",", ":")).encode()
