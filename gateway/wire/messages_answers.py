"""Answers of /v1/messages: the whole message, its event stream, errors, the models list, and their OpenAPI models.

    message_start
    per block: content_block_start · content_block_delta … · content_block_stop
        thinking (thinking_delta …, signature_delta) · text (text_delta …) · tool_use (input_json_delta, whole)
    message_delta (stop_reason, usage) · message_stop          (or error, where the answer broke off)

A block is opened by its first piece: an answer that is calls alone has no text block, as in the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from penstock.gateway.wire.answers import Shape, sse_event
from penstock.gateway.wire.chat import arguments_text
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.thinking_blocks import BlockSplitter, Kind, divide
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, Finish
from penstock.tools.parsers import ToolCall

PING = sse_event({"type": "ping"})


# shapes ------------------------------------------------------------------------------------------------------------
class CountAnswer(Shape):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicError(Shape):
    type: str
    message: str
    """Begins with the wrong field, as the client wrote it: ``messages.0.content: …``."""


class AnthropicErrorBody(Shape):
    """``{"type": "error", "error": {"type", "message"}}``, the shape that Anthropic's clients read."""

    type: Literal["error"]
    error: AnthropicError


# whole answers -----------------------------------------------------------------------------------------------------
def message_body(request: CompletionRequest, head: AnswerHead, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer. The API has no `n`: there is one choice."""
    (choice,) = choices
    return {
        **_frame(head),
        "content": _blocks(head, choice),
        **_ending(choice),
        "usage": _usage(head, len(choice.token_ids)),
    }


def anthropic_models_body(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of `anthropic_model_body`s."""
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}


def anthropic_model_body(name: str) -> dict[str, Any]:
    """One model, for clients that send ``anthropic-version``."""
    created = datetime.fromtimestamp(0, UTC).isoformat()
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""HTTP status → type. The `anthropic` package raises its exceptions by status and retries 409, 429 and 5xx."""


def anthropic_error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the error in Anthropic's shape, see `error_body`. It has no `param`: messages of invalid requests begin
    with it.
    """
    kind = _KINDS.get(status) or _KINDS[400 if status < 500 else 500]
    # Claude Code compacts its conversation on these words.
    words = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    return {"type": "error", "error": {"type": kind, "message": words}}


def _frame(head: AnswerHead) -> dict[str, Any]:
    return {"id": head.answer_id, "type": "message", "role": "assistant", "model": head.model}


def _ending(choice: Choice) -> dict[str, Any]:
    by_string = choice.finish_reason == "stop" and choice.stop_string is not None
    reasons: dict[Finish, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if by_string else reasons[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": choice.stop_string if by_string else None}


def _usage(head: AnswerHead, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": head.prompt_tokens - head.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": head.cached_tokens,
        "output_tokens": sampled,
    }


def _blocks(head: AnswerHead, choice: Choice) -> list[dict[str, Any]]:
    parts = divide(choice.content, inside=head.inside_thinking)
    blocks: list[dict[str, Any]] = []
    if parts.thinking is not None:
        blocks.append({"type": "thinking", "thinking": parts.thinking, "signature": parts.signature})
    if parts.text:
        blocks.append({"type": "text", "text": parts.text})
    return blocks + [{**_opened(call), "input": dict(call.arguments)} for call in choice.calls]


def _opened(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}


# streams -----------------------------------------------------------------------------------------------------------
class MessageStream:
    """Same interface as `ChatStream`; the index is always 0."""

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        self._head = head
        self._splitter = BlockSplitter(inside=head.inside_thinking)
        self._shown = 0
        """Characters of content that were given to the splitter."""
        self._open: Kind | None = None
        self._index = -1
        """Index of the newest block."""
        self._choice: Choice | None = None

    def start(self) -> bytes:
        """The message, empty."""
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._head, 0),
        }
        return sse_event({"type": "message_start", "message": {**_frame(self._head), **empty}})

    def feed(self, index: int, delta: TextDelta) -> bytes:
        """Text that can be shown."""
        self._shown += len(delta.text)
        return b"".join(self._piece(kind, text) for kind, text in self._splitter.feed(delta.text))

    def finish(self, choice: Choice) -> bytes:
        """The rest of the text, and the calls."""
        self._choice = choice
        events = [self.feed(0, TextDelta(choice.content[self._shown :]))]
        events += [self._piece(kind, text) for kind, text in self._splitter.flush()]
        if self._splitter.thinks and self._index < 0:
            events.append(self._piece("thinking", ""))
        events.append(self._close())
        events += [self._call(call) for call in choice.calls]
        return b"".join(events)

    def end(self) -> bytes:
        """Why it ended, and the usage. Comes after `finish`."""
        if self._choice is None:
            raise ValueError("end() before finish()")
        usage = _usage(self._head, len(self._choice.token_ids))
        last = sse_event({"type": "message_delta", "delta": _ending(self._choice), "usage": usage})
        return last + sse_event({"type": "message_stop"})

    def fail(self, status: int, message: str) -> bytes:
        """End an answer that broke off, in place of `end`."""
        return sse_event(anthropic_error_body(status, message))

    # pieces ---------------------------------------------------------------------------------------------------------
    def _piece(self, kind: Kind, text: str) -> bytes:
        opened = b"" if self._open == kind else self._close() + self._begin(kind)
        return opened + (self._delta({"type": f"{kind}_delta", kind: text}) if text else b"")

    def _begin(self, kind: Kind) -> bytes:
        self._open = kind
        more = {"signature": ""} if kind == "thinking" else {}
        return self._start_block({"type": kind, kind: "", **more})

    def _close(self) -> bytes:
        """Ends the open block; the signature of thinking is known by then."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": self._splitter.signature})
        return signed + self._stop_block()

    def _call(self, call: ToolCall) -> bytes:
        events = [
            self._start_block(_opened(call)),
            self._delta({"type": "input_json_delta", "partial_json": arguments_text(call)}),
            self._stop_block(),
        ]
        return b"".join(events)

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return sse_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop_block(self) -> bytes:
        return sse_event({"type": "content_block_stop", "index": self._index})
