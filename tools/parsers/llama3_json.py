"""Llama 3.1 and later: ``{"name": "python", "parameters": {"code": "1 + 1"}}``, with or without ``<|python_tag|>``.

No mark says where a call begins. It is read behind ``<|python_tag|>``, and where a line begins with an object whose
first keys are those of a call; further calls follow it with or without ``;``. Any other JSON is content.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import add_call, arguments_key, read_json
from penstock.tools.parsers.turn import UNREAD, Malformed, Tools, TurnBuilder, read_each, skip_space

TAG = "<|python_tag|>"
SHAPE = 'a call is written {"name": ..., "parameters": {...}}'
_GAP = r"\s{0,32}"
_KEYS = (
    rf'\{{{_GAP}(?:"type"{_GAP}:{_GAP}"function"{_GAP},{_GAP})?'
    rf'"name"{_GAP}:{_GAP}"(?:[^"\\]|\\.){{0,256}}"{_GAP},{_GAP}"(parameters|arguments)"{_GAP}:'
)
_CALL = re.compile(rf"{re.escape(TAG)}|^[ \t]{{0,32}}(?={_KEYS})", re.MULTILINE)
_NEXT = re.compile(rf"(?:;{_GAP})?(?={_KEYS})")


class Llama3JsonParser:
    opening, closing = "", ""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return read_each(text, _CALL, SHAPE, _read_calls)


def _read_calls(text: str, mark: re.Match[str], turn: TurnBuilder) -> int:
    """Nothing marks the end of a call: after an unreadable one the meaning of the rest is unknown."""
    position = mark.end()
    try:
        while True:
            value, position = read_json(text, position)
            add_call(turn, value, arguments_key(value, "parameters", "arguments"), also=("type",))
            following = _NEXT.match(text, skip_space(text, position))
            if turn.full or following is None:
                return position
            position = following.end()
    except Malformed as problem:
        turn.malformed(f"{problem}{UNREAD}")
        return len(text)
