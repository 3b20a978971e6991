"""Granite 3: ``<|tool_call|>[{"name": "python", "arguments": {"code": "1 + 1"}}, ...]``.

Granite 4 writes as `hermes` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_call_list
from penstock.tools.parsers.turn import TurnBuilder, read_marked

OPEN = "<|tool_call|>"
SHAPE = f'calls are written {OPEN}[{{"name": ..., "arguments": {{...}}}}, ...]'


class GraniteParser:
    opening, closing = OPEN, ""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_calls)


def _read_calls(text: str, body: int, turn: TurnBuilder) -> int:
    calls, end = read_call_list(text, body)
    for name, arguments in calls:
        turn.call(name, arguments)
    return end
