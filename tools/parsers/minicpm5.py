"""MiniCPM5: ``<function name="python"><param name="code">1 + 1</param></function>``, several times.

Text that holds ``<``, ``&`` or a line break stands in ``<![CDATA[...]]>``.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect, until

OPEN, CLOSE = "<function name=", "</function>"
PARAM, END_PARAM = "<param name=", "</param>"
CDATA, END_CDATA = "<![CDATA[", "]]>"
SHAPE = f'a call is written {OPEN}"NAME">{PARAM}"KEY">VALUE{END_PARAM}{CLOSE}'
_NAME = re.compile(r'"([^"<>\n]{1,256})">')
_PARAM = re.compile(rf'\s*{PARAM}"([^"<>\n]{{1,256}})">')


class MiniCpm5Parser(MarkedParser):
    opening, closing = OPEN, CLOSE
    shape = SHAPE

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        head = _NAME.match(text, body)
        if head is None:
            raise Malformed(f'"NAME"> belongs behind {OPEN}')
        reader = ArgumentReader(head[1], tools, (OPEN, CLOSE, PARAM, END_PARAM))
        position = head.end()
        while param := _PARAM.match(text, position):
            is_text = text.startswith(CDATA, param.end())
            start, mark = (param.end() + len(CDATA), END_CDATA + END_PARAM) if is_text else (param.end(), END_PARAM)
            value, position = until(text, start, mark)
            if is_text:
                reader.add_value(param[1], value, value)
            else:
                reader.add(param[1], value)
        position = expect(text, position, CLOSE)
        turn.call(head[1], reader.done())
        return position
