"""DeepSeek: special tokens around each call and around them all.

V3 and R1: ``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python\\n```json\\n{"code": "1 + 1"}\\n```
<｜tool▁call▁end｜><｜tool▁calls▁end｜>``; since V3.1 ``<｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "1 + 1"}
<｜tool▁call▁end｜>`` inside. Both are read. R1 and V3 leave the last mark out at times, so it may be missing.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import NAME, Malformed, MarkedParser, Tools, TurnBuilder, expect, skip_space

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"
SHAPE = f"calls are written {CALLS}{CALL}NAME{SEPARATOR}{{...}}{END_CALL}{END_CALLS}"
_HEAD = re.compile(rf"\s*({NAME})\s*{re.escape(SEPARATOR)}")
_NAME_LINE = re.compile(rf"\s*({NAME})[ \t]*\n```json\n")


class DeepSeekParser(MarkedParser):
    opening, closing = CALLS, END_CALLS
    shape = SHAPE

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        position = _read_call(text, expect(text, body, CALL), turn)
        while not turn.full and text.startswith(CALL, following := skip_space(text, position)):
            position = _read_call(text, following + len(CALL), turn)
        if turn.full or not text[skip_space(text, position) :]:
            return len(text)
        return expect(text, position, END_CALLS)


def _read_call(text: str, start: int, turn: TurnBuilder) -> int:
    head = _HEAD.match(text, start)
    if head is None:
        raise Malformed(f"a name and {SEPARATOR} belong behind {CALL}")
    line = _NAME_LINE.match(text, head.end())
    if line is None:
        name, body, fence = head[1], head.end(), ""
    elif head[1] == "function":
        name, body, fence = line[1], line.end(), FENCE
    else:
        raise Malformed(f"unknown kind of tool {head[1][:80]!r}, only function is known")
    arguments, end = read_arguments(text, body, name)
    end = expect(text, expect(text, end, fence), END_CALL)
    turn.call(name, arguments)
    return end
