"""Hermes and Qwen: ``<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>``, several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import add_call, read_json
from penstock.tools.parsers.turn import Malformed, TurnBuilder, read_marked, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SHAPE = 'a call is written <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


class HermesParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_call, resume_behind=CLOSE)


def _read_call(text: str, body: int, turn: TurnBuilder) -> int:
    value, end = read_json(text, body)
    closing = skip_space(text, end)
    if not text.startswith(CLOSE, closing):
        raise Malformed("text follows the JSON" if text[closing:] else f"{CLOSE} is missing")
    add_call(turn, value)
    return closing + len(CLOSE)
