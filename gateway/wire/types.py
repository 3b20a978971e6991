"""Requests and answers, independent of HTTP and of the APIs' formats, and their ids.

    body ──parse (`wires.py`)──► CompletionRequest ──(sampling)──► Choice ──► body, events

Ids are derived, so that an answer restored from the journal has the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.tools.parsers import ToolCall

Api = Literal["chat", "completions", "responses", "messages"]
Finish = Literal["stop", "length", "tool_calls"]
EngineFinish = Literal["stop", "length"]


class InvalidRequest(Exception):
    """The request is invalid or unsupported: 400, `field` as the client wrote it."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.code = code
        """``unsupported_parameter``, ``unknown_parameter``, ``invalid_value`` or None"""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request by any of the routes. All fields of the body that are not here cannot change the sampled tokens."""

    api: Api
    model: str
    """Model as the client wrote it; the session checks it."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages as a chat template takes them; empty for /v1/completions. Of /v1/responses: this request's items
    only.
    """
    prompt: str | tuple[int, ...] | None = None
    """/v1/completions only: text, or exact ids."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the shape of `BaseTool.schema`."""
    template_settings: Mapping[str, Any] = field(default_factory=dict)
    """/v1/chat/completions only: what the chat template is to be given; the session refuses others than the run's."""
    tool_choice: Literal["auto", "none"] = "auto"
    """``none``: tools are rendered into the prompt all the same, calls in the answer stay text."""
    parallel_tool_calls: bool = True
    """False: the answer ends after its first call."""
    n: int = 1
    """Choices, independent answers to the same context."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Sampling` that the client set: temperature, top_p, top_k, max_new_tokens, seed."""
    limit_is_bound: bool = False
    """/v1/messages only, where a client must name a limit: a lower one of the run holds."""
    stop: tuple[str, ...] = ()
    """The text of the answer ends before the first of these; the ids that spell it are kept as sampled."""
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    """A chunk with usage at the end of a stream (always there in /v1/responses)."""
    instructions: str | None = None
    """/v1/responses only: a system message before all others, not inherited through `previous_response_id`."""
    previous_response_id: str | None = None
    """/v1/responses only: the response whose messages come before `messages`."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """/v1/responses only: fields of the request that its answer repeats."""
    stored: bool = True
    """/v1/responses only: clients may ask for the answer again."""

    @property
    def reads_calls(self) -> bool:
        """True if calls in the answer are parsed."""
        return bool(self.tools) and self.tool_choice == "auto"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token as clients see it."""

    text: str
    """Text of the token; ``bytes:\\xf0\\x9f`` for a part of a character."""
    raw: bytes
    """UTF-8; joined over an answer these are its text, special tokens included."""
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer of N sampled tokens."""

    index: int
    token_ids: tuple[int, ...]
    """[N], including the one that completed a stop string or closed the turn."""
    logprobs: tuple[float, ...]
    """[N]"""
    text: str
    """Decoded, without the closing id, before the stop string; calls as the model wrote them."""
    content: str
    """All of `text` if there are no calls, otherwise the text around them."""
    calls: tuple[ToolCall, ...] = ()
    """Well-formed ones, with ids that are stable for this answer."""
    finish_reason: Finish = "stop"
    stop_string: str | None = None
    """The stop string of the request that ended the answer."""
    tokens: tuple[SampledToken, ...] = ()
    """[N] where log-probabilities were requested, otherwise empty."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Fields of an answer that are known before its first token."""

    answer_id: str
    """``chatcmpl-…``, ``cmpl-…``, ``resp_…`` or ``msg_…``; ids of calls and items are derived from it."""
    created_s: int
    """Unix time."""
    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that continue an earlier answer of this episode."""
    inside_thinking: bool = False
    """/v1/messages only: the prompt ends inside thinking that it opened, and the answer begins there."""


_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


def answer_id(api: Api, key: str) -> str:
    """The id of the answer named by `key`, for example episode and turn."""
    return _PREFIX[api] + _digest(key, 32)


def call_id(answer: str, index: int, position: int) -> str:
    """Return the id of a tool call: by answer, choice and place in it."""
    return "call_" + _digest(f"{answer}/{index}/{position}", 24)


def item_id(kind: str, answer: str, position: int) -> str:
    """Return the id of an output item of /v1/responses; `kind` is ``msg`` or ``fc``."""
    return f"{kind}_" + _digest(f"{answer}/{kind}/{position}", 32)


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
