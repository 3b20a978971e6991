"""`Choice`s → the answer of /v1/chat/completions, whole or as a stream.

A stream, per choice and in any order among choices: role, text and token log-probabilities as they come, the rest of
the text, calls (whole, one chunk each), finish_reason; then usage where asked for, then ``[DONE]``. Text that may turn
out to be a stop string or a call was held back by `AnswerReader`, so a client's sum of a stream is the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.gateway.wire import sse
from penstock.gateway.wire.errors import error_body
from penstock.gateway.wire.messages import arguments_text
from penstock.gateway.wire.reader import Delta
from penstock.gateway.wire.types import Ask, Choice, Head, Token
from penstock.tools.parsers import ToolCall


def chat_body(ask: Ask, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """A ``chat.completion``."""
    whole = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": _logprobs(choice.tokens) if ask.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return {**_frame(head, "chat.completion"), "choices": whole, "usage": usage(head, choices)}


class ChatStream:
    """`start` once, `feed` and one `finish` per choice, `end` once; each gives bytes for the client, maybe none."""

    def __init__(self, ask: Ask, head: Head) -> None:
        self._ask = ask
        self._frame = _frame(head, "chat.completion.chunk")
        self._head = head
        self._shown = [0] * ask.n
        """Characters of content sent, by choice."""
        self._tokens = [0] * ask.n
        self._done: list[Choice] = []

    def start(self) -> bytes:
        """The role of each choice, so that clients see life before the first token."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, opening) for index in range(self._ask.n))

    def feed(self, index: int, delta: Delta) -> bytes:
        """Text that can be shown and tokens that were sampled meanwhile."""
        if not delta.text and not delta.tokens:
            return b""
        self._shown[index] += len(delta.text)
        self._tokens[index] += len(delta.tokens)
        return self._chunk(index, {"content": delta.text}, delta.tokens)

    def finish(self, choice: Choice) -> bytes:
        """The rest of a choice, its calls, and why it ended."""
        rest = Delta(choice.content[self._shown[choice.index] :], choice.tokens[self._tokens[choice.index] :])
        events = [self.feed(choice.index, rest)]
        events += [self._chunk(choice.index, {"tool_calls": [_call(one, i)]}) for i, one in enumerate(choice.calls)]
        events.append(self._chunk(choice.index, {}, finish_reason=choice.finish_reason))
        self._done.append(choice)
        return b"".join(events)

    def end(self) -> bytes:
        """Usage where asked for, and the end of the stream."""
        if not self._ask.include_usage:
            return sse.DONE
        return sse.data({**self._frame, "choices": [], "usage": usage(self._head, self._done)}) + sse.DONE

    def fail(self, status: int, message: str) -> bytes:
        """Instead of `end` where the answer broke off: clients raise it. There is no ``[DONE]`` behind it."""
        return sse.data(error_body(status, message))

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token] = (), finish_reason: str | None = None
    ) -> bytes:
        logprobs = _logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        more = {"usage": None} if self._ask.include_usage else {}
        return sse.data({**self._frame, "choices": [choice], **more})


def usage(head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """Counts of ids: of the context, once, and of all answers, closing ids included."""
    sampled = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": head.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": head.cached_tokens},
    }


def _frame(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.answer_id, "object": kind, "created": head.created_s, "model": head.model}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall, position: int | None = None) -> dict[str, Any]:
    """`position` is written in streams only."""
    where = {} if position is None else {"index": position}
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {**where, "id": call.call_id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """`top_logprobs` is empty: only the sampled token's is known."""
    content = [
        {"token": one.text, "bytes": list(one.raw), "logprob": one.logprob, "top_logprobs": []} for one in tokens
    ]
    return {"content": content, "refusal": None}
