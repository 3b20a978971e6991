"""Nemotron Nano 2 and Super 1.5: ``<TOOLCALL>[{"name": "python", "arguments": {"code": "1 + 1"}}, ...]</TOOLCALL>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_call_list
from penstock.tools.parsers.turn import TurnBuilder, expect, read_marked

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
SHAPE = f'calls are written {OPEN}[{{"name": ..., "arguments": {{...}}}}, ...]{CLOSE}'


class NemotronParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_calls)


def _read_calls(text: str, body: int, turn: TurnBuilder) -> int:
    calls, end = read_call_list(text, body)
    end = expect(text, end, CLOSE)
    for name, arguments in calls:
        turn.call(name, arguments)
    return end
