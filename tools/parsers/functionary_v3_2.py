"""Functionary 3.2: ``>>>python\\n{"code": "1 + 1"}``, several times; the prompt has written the first ``>>>``.

``>>>all`` addresses the user: content, as is any ``>>>`` without a name, a line break and an object behind it.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import NAME, UNREAD, Malformed, Tools, TurnBuilder, read_each

MARK, USER = ">>>", "all"
SHAPE = f"a call is written {MARK}NAME\n{{...}}"
_HEAD = re.compile(rf"(?:\A|{MARK})({NAME})\n(?=\s{{0,32}}\{{)")


class FunctionaryV32Parser:
    opening, closing = "", ""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return read_each(text, _HEAD, SHAPE, _read_message)


def _read_message(text: str, head: re.Match[str], turn: TurnBuilder) -> int:
    """Nothing marks the end of a call: after an unreadable one the meaning of the rest is unknown."""
    if head[1] == USER:
        turn.say(head[0])
        return head.end()
    try:
        arguments, end = read_arguments(text, head.end(), head[1])
    except Malformed as problem:
        turn.malformed(f"{problem}{UNREAD}", head[1])
        return len(text)
    turn.call(head[1], arguments)
    return end
