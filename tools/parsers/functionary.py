"""Functionary 3.1, and Llama 3.1 with tools of one's own: ``<function=python>{"code": "1 + 1"}</function>``."""

from __future__ import annotations

import re

from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import NAME, Malformed, MarkedParser, Tools, TurnBuilder, expect

_NAME = re.compile(rf"({NAME})>")


class FunctionaryParser(MarkedParser):
    opening, closing = "<function=", "</function>"
    shape = f"a call is written {opening}NAME>{{...}}{closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        name = _NAME.match(text, body)
        if name is None:
            raise Malformed(f"a name and > belong behind {self.opening}")
        arguments, end = read_arguments(text, name.end(), name[1])
        end = expect(text, end, self.closing)
        turn.call(name[1], arguments)
        return end
