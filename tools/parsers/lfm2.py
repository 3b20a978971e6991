"""LFM2 and LFM2.5: ``<|tool_call_start|>[python(code='1 + 1')]<|tool_call_end|>``, the list as in `pythonic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.pythonic import read_list
from penstock.tools.parsers.turn import TurnBuilder, expect, read_marked

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
SHAPE = f"calls are written {OPEN}[NAME(KEY=VALUE, ...), ...]{CLOSE}"


class Lfm2Parser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            calls, end = read_list(text, expect(text, body, "["), tools)
            end = expect(text, end, CLOSE)
            for name, arguments in calls:
                turn.call(name, arguments)
            return end

        return read_marked(text, OPEN, SHAPE, read)
