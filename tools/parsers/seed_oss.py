"""Seed-OSS: its own marks, ``<function=python>\\n<parameter=code>1 + 1</parameter>\\n</function>`` between them.

As `qwen3_coder`, but a value stands between its tags without lines of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.qwen3_coder import MARKS, read_function
from penstock.tools.parsers.turn import TurnBuilder, expect, read_marked

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
SHAPE = f"a call is written {OPEN}\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n{CLOSE}"


class SeedOssParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            name, arguments, end = read_function(text, body, tools, (OPEN, CLOSE, *MARKS[2:]), own_lines=False)
            end = expect(text, end, CLOSE)
            turn.call(name, arguments)
            return end

        return read_marked(text, OPEN, SHAPE, read)
