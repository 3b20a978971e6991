"""The event stream of /v1/responses.

    created · in_progress
    output_item.added · content_part.added · output_text.delta … ·
        output_text.done · content_part.done · output_item.done
    per call: output_item.added · function_call_arguments.delta · function_call_arguments.done · output_item.done
    completed | incomplete          (or failed, where the answer broke off)

The message is opened by the first text, so that an answer that is calls alone has none, as in the whole answer.
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.wire.answers import sse_event, token_logprobs
from penstock.gateway.wire.chat import arguments_text
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.responses import (
    call_item,
    message_item,
    opening_body,
    output_items,
    output_text,
    response_body,
)
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, SampledToken
from penstock.tools.parsers import ToolCall


class ResponseStream:
    """Same interface as `ChatStream`; the index is always 0."""

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        self._request = request
        self._head = head
        self._number = 0
        self._open = False
        """The message was opened."""
        self._shown = 0
        self._waiting: list[SampledToken] = []
        """Sampled before the message was opened, to be sent with its first text."""
        self._tokens_sent = 0
        self._choice: Choice | None = None

    def start(self) -> bytes:
        """The response, empty."""
        body = opening_body(self._request, self._head)
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def feed(self, index: int, delta: TextDelta) -> bytes:
        """Text that can be shown and tokens that were sampled meanwhile."""
        self._waiting.extend(delta.tokens)
        if not delta.text and not (self._open and self._waiting):
            return b""
        return self._open_message() + self._text(delta.text)

    def finish(self, choice: Choice) -> bytes:
        """Returns the events for the rest of the text and for the calls."""
        self._choice = choice
        items = output_items(self._head, choice)
        events = []
        if items[0]["type"] == "message":
            events.append(self._open_message())
            seen = self._tokens_sent + len(self._waiting)
            events.append(self.feed(0, TextDelta(choice.content[self._shown :], choice.tokens[seen:])))
            part = items[0]["content"][0]
            events += [
                self._event("output_text.done", **self._position(), text=choice.content, logprobs=part["logprobs"]),
                self._event("content_part.done", **self._position(), part=part),
                self._event("output_item.done", output_index=0, item=items[0]),
            ]
        first = len(items) - len(choice.calls)
        events += [self._call(call, i, first + i) for i, call in enumerate(choice.calls)]
        return b"".join(events)

    def end(self) -> bytes:
        """The whole response; this API has no ``[DONE]``. Comes after `finish`."""
        if self._choice is None:
            raise ValueError("end() before finish()")
        body = response_body(self._request, self._head, [self._choice])
        return self._event(body["status"], response=body)

    def fail(self, status: int, message: str) -> bytes:
        """End an answer that broke off, in place of `end`."""
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        body = opening_body(self._request, self._head, "failed")
        return self._event("failed", response={**body, "error": {"code": code, "message": message}})

    # pieces ---------------------------------------------------------------------------------------------------------
    def _open_message(self) -> bytes:
        if self._open:
            return b""
        self._open = True
        item = message_item(self._head, [], "in_progress")
        return self._event("output_item.added", output_index=0, item=item) + self._event(
            "content_part.added", **self._position(), part=output_text("")
        )

    def _text(self, text: str) -> bytes:
        tokens, self._waiting = self._waiting, []
        self._tokens_sent += len(tokens)
        self._shown += len(text)
        return self._event("output_text.delta", **self._position(), delta=text, logprobs=token_logprobs(tokens))

    def _call(self, call: ToolCall, position: int, output_index: int) -> bytes:
        opened, whole = (call_item(self._head, call, position, status) for status in ("in_progress", "completed"))
        where = {"item_id": whole["id"], "output_index": output_index}
        arguments = arguments_text(call)
        events = [
            self._event("output_item.added", output_index=output_index, item=opened),
            self._event("function_call_arguments.delta", **where, delta=arguments),
            self._event("function_call_arguments.done", **where, name=call.name, arguments=arguments),
            self._event("output_item.done", output_index=output_index, item=whole),
        ]
        return b"".join(events)

    def _position(self) -> dict[str, Any]:
        return {"item_id": message_item(self._head, [], "")["id"], "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **body: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse_event({"type": f"response.{kind}", "sequence_number": number, **body})
