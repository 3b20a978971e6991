"""The wires: what an API's requests and answers look like. Everything behind them is the same for all.

    body ──parse──► CompletionRequest ──► session, prefix tree, journal ──► Choice ──answer | stream──► client

A further API is one file with these functions and one entry here (and its name in `types.Api`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from penstock.gateway.wire.answers import KEEP_ALIVE, OpenAIErrorBody, error_body
from penstock.gateway.wire.chat import ChatBody, ChatStream, chat_body, parse_chat
from penstock.gateway.wire.completions import CompletionBody, CompletionStream, completion_body, parse_completion
from penstock.gateway.wire.messages import MessagesBody, parse_messages
from penstock.gateway.wire.messages_answers import (
    PING,
    AnthropicErrorBody,
    MessageStream,
    anthropic_error_body,
    message_body,
)
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.responses import ResponseBody, parse_response, response_body
from penstock.gateway.wire.responses_stream import ResponseStream
from penstock.gateway.wire.types import AnswerHead, Api, Choice, CompletionRequest


class EventStream(Protocol):
    """`start` once, `feed` and one `finish` per choice, `end` or `fail` once; each returns the bytes of some events."""

    def start(self) -> bytes: ...
    def feed(self, index: int, delta: TextDelta) -> bytes: ...
    def finish(self, choice: Choice) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, status: int, message: str) -> bytes: ...


class WriteError(Protocol):
    """The body of an error for clients of one vendor."""

    def __call__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    body: WriteError
    schema: type[BaseModel]
    """Schema for OpenAPI."""
    request_id_header: str
    """The header of every answer's id; clients show its value with an error."""


OPENAI_ERRORS = ErrorFormat(error_body, OpenAIErrorBody, "x-request-id")
ANTHROPIC_ERRORS = ErrorFormat(anthropic_error_body, AnthropicErrorBody, "request-id")


@dataclass(frozen=True, slots=True)
class Wire:
    """One API's format."""

    api: Api
    path: str
    """Path of its route, under ``/v1/``."""
    body: type[BaseModel]
    """Body of requests, for OpenAPI."""
    parse: Callable[[Any], CompletionRequest]
    """Takes parsed JSON, whatever it is. Raises `InvalidRequest`."""
    answer: Callable[[CompletionRequest, AnswerHead, Sequence[Choice]], dict[str, Any]]
    """The whole answer."""
    stream: Callable[[CompletionRequest, AnswerHead], EventStream]
    client_fields: Mapping[str, str]
    """Fields of `GenerateRequest` and `Sampling` as this API calls them, where the names differ."""
    errors: ErrorFormat = OPENAI_ERRORS
    keep_alive: bytes = KEEP_ALIVE
    """Sent in silence."""
    client: str = "openai client"
    """Name of the recording client in trajectories."""


WIRES: Mapping[Api, Wire] = {
    wire.api: wire
    for wire in (
        Wire(
            "chat", "chat/completions", ChatBody, parse_chat, chat_body, ChatStream,
            {"token_ids": "messages", "max_new_tokens": "max_tokens"},
        ),
        Wire(
            "completions", "completions", CompletionBody, parse_completion, completion_body, CompletionStream,
            {"token_ids": "prompt", "max_new_tokens": "max_tokens"},
        ),
        Wire(
            "responses", "responses", ResponseBody, parse_response, response_body, ResponseStream,
            {"token_ids": "input", "max_new_tokens": "max_output_tokens"},
        ),
        Wire(
            "messages", "messages", MessagesBody, parse_messages, message_body, MessageStream,
            {"token_ids": "messages", "max_new_tokens": "max_tokens"},
            errors=ANTHROPIC_ERRORS, keep_alive=PING, client="anthropic client",
        ),
    )
}  # fmt: skip


def wire_at(path: str) -> Wire | None:
    """The wire of a path under ``/v1/``, its sub-routes included."""
    return next((wire for wire in WIRES.values() if f"{path}/".startswith(f"{wire.path}/")), None)
