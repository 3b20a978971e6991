"""Cohere Command R and R+: ``Action:`` and a block of JSON behind it.

``Action:\\n```json\\n[{"tool_name": "python", "parameters": {"code": "1 + 1"}}, ...]``` ``. ``Action:`` begins a line;
without the block it is content, and so is what ends before a ``</think>``.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_call_list
from penstock.tools.parsers.turn import NamedCall, Tools, expect, read_unmarked

OPEN, FENCE = "Action:", "```"
SHAPE = f'calls are written {OPEN}\n{FENCE}json\n[{{"tool_name": ..., "parameters": {{...}}}}, ...]{FENCE}'
_LIST = re.compile(rf"^[ \t]{{0,32}}{OPEN}\s{{0,32}}{FENCE}json\s{{0,32}}(?=\[)", re.MULTILINE)


class CommandRParser:
    opening, closing = OPEN, FENCE

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return read_unmarked(text, _LIST, SHAPE, _read_calls)


def _read_calls(text: str, body: int) -> tuple[list[NamedCall], int]:
    calls, end = read_call_list(text, body, ("tool_name", "parameters"))
    return calls, expect(text, end, FENCE)
