"""Functionary 3.1, and Llama 3.1 with tools of one's own: ``<function=python>{"code": "1 + 1"}</function>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import NAME, Malformed, TurnBuilder, expect, read_marked

OPEN, CLOSE = "<function=", "</function>"
SHAPE = f"a call is written {OPEN}NAME>{{...}}{CLOSE}"
_NAME = re.compile(rf"({NAME})>")


class FunctionaryParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_call)


def _read_call(text: str, body: int, turn: TurnBuilder) -> int:
    name = _NAME.match(text, body)
    if name is None:
        raise Malformed(f"a name and > belong behind {OPEN}")
    arguments, end = read_arguments(text, name.end(), name[1])
    end = expect(text, end, CLOSE)
    turn.call(name[1], arguments)
    return end
