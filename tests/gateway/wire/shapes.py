"""Whole answers of each API, without extra fields: a field that is sent and not declared here fails a test."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from penstock.gateway.wire.answers import Shape


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
    tool_calls: list[ToolCallBody] = Field([])


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


class ThinkingAnswer(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class TextAnswer(Shape):
    type: Literal["text"]
    text: str


class ToolUseAnswer(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Shape):
    input_tokens: int
    """Without those of the next two."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Those that continue an earlier answer of this episode."""
    output_tokens: int


class MessageAnswer(Shape):
    """`message_body`"""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[ThinkingAnswer | TextAnswer | ToolUseAnswer, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
