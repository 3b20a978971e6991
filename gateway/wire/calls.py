"""Tool calls in an answer: where the first may begin, and how an answer is divided into content and calls.

Content is what the model wrote, character for character, thinking included; nothing is moved to `reasoning_content`.
Only where an answer has calls, the space between content and the first call is left out. A call that cannot be read
stays text, and with it the whole answer: half of what a model asked for must not run as if it were everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.gateway.wire.ids import call_id
from penstock.tools.parsers import ToolCall, ToolCallParser, get_parser


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How one model writes calls, by its parser's own marks."""

    parser: ToolCallParser

    @property
    def opening(self) -> str:
        """What every call begins with; empty: nothing is streamed of answers that may hold calls."""
        return self.parser.opening

    @property
    def closing(self) -> str:
        """What every call ends with; empty: an answer is not cut behind its first call."""
        return self.parser.closing

    def start(self, text: str) -> int:
        """Where the first call begins, or the end of `text`."""
        at = text.find(self.opening)
        return at if at >= 0 else len(text)

    def one_is_whole(self, text: str) -> bool:
        """A well-formed call is complete in `text`."""
        if not self.closing or self.closing not in text:
            return False
        calls = self.parser.parse(text[self.start(text) :]).calls
        return bool(calls) and calls[0].error is None

    def divide(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """(content, calls). Content begins with ``text[: start].rstrip()`` in any case, which may be shown early."""
        start = self.start(text)
        turn = self.parser.parse(text[start:], tools)
        if not turn.calls or any(call.error for call in turn.calls):
            return text, ()
        before = text[:start]
        return (before + turn.content if turn.content else before.rstrip()), turn.calls


def call_syntax(parser: str) -> CallSyntax:
    """By the name in `agent.parser`. Raises `ValueError` naming the nearest."""
    return CallSyntax(get_parser(parser))


def with_ids(calls: tuple[ToolCall, ...], answer_id: str, index: int) -> tuple[ToolCall, ...]:
    """The same calls with ids that are the same whenever this answer is told again."""
    return tuple(replace(call, call_id=call_id(answer_id, index, i)) for i, call in enumerate(calls))
