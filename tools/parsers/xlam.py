"""xLAM: one JSON list, ``[{"name": "python", "arguments": {"code": "1 + 1"}}, ...]``, and no mark.

It begins where a line begins with a list whose first object has the keys of a call; any other JSON is content, and so
is what ends before a ``</think>``.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_call_list
from penstock.tools.parsers.turn import Tools, read_unmarked

SHAPE = 'calls are written [{"name": ..., "arguments": {...}}, ...]'
_GAP = r"\s{0,32}"
_LIST = re.compile(
    rf'^[ \t]{{0,32}}(?=\[{_GAP}\{{{_GAP}"name"{_GAP}:{_GAP}"(?:[^"\\]|\\.){{0,256}}"{_GAP},{_GAP}"arguments"{_GAP}:)',
    re.MULTILINE,
)


class XlamParser:
    opening, closing = "", ""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return read_unmarked(text, _LIST, SHAPE, read_call_list)
