"""Granite 20B (function calling): ``<function_call> {"name": "python", "arguments": {"code": "1 + 1"}}``, and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import add_call, read_json
from penstock.tools.parsers.turn import TurnBuilder, read_marked

OPEN = "<function_call>"
SHAPE = f'a call is written {OPEN} {{"name": ..., "arguments": {{...}}}}'


class Granite20bFcParser:
    opening, closing = OPEN, ""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_call)


def _read_call(text: str, body: int, turn: TurnBuilder) -> int:
    value, end = read_json(text, body)
    add_call(turn, value)
    return end
