"""Qwen3-Coder: XML-like tags, each value on its own lines.

``<tool_call>\\n<function=python>\\n<parameter=code>\\n1 + 1\\n</parameter>\\n</function>\\n</tool_call>``
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, TurnBuilder, expect, read_marked, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MARKS = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
SHAPE = (
    "a call is written <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)
_WORD = re.compile(r"([^<>\r\n]+)>")


class Qwen3CoderParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            return _read_call(text, body, turn, tools)

        return read_marked(text, OPEN, SHAPE, read)


def _read_call(text: str, body: int, turn: TurnBuilder, tools: Sequence[Mapping[str, Any]]) -> int:
    name, arguments, position = read_function(text, body, tools, MARKS, own_lines=True)
    position = expect(text, position, CLOSE)
    turn.call(name, arguments)
    return position


def read_function(
    text: str, body: int, tools: Sequence[Mapping[str, Any]], marks: Sequence[str], *, own_lines: bool
) -> tuple[str, dict[str, Any], int]:
    """Name, arguments and where the function ends.

    `own_lines`: a value stands on lines of its own; the line break before it and the one after it are not part of it.

    Raises `Malformed`.
    """
    name, position = _read_word(text, expect(text, body, FUNCTION))
    reader = ArgumentReader(name, tools, marks)
    while text.startswith(PARAMETER, position := skip_space(text, position)):
        key, start = _read_word(text, position + len(PARAMETER))
        end = text.find(END_PARAMETER, start)
        if end < 0:
            raise Malformed(f"{END_PARAMETER} is missing")
        value = text[start:end]
        reader.add(key, value.removeprefix("\n").removesuffix("\n") if own_lines else value)
        position = end + len(END_PARAMETER)
    return name, reader.done(), expect(text, position, END_FUNCTION)


def _read_word(text: str, start: int) -> tuple[str, int]:
    """What stands before ``>``, and the place behind it."""
    match = _WORD.match(text, start)
    if match is None:
        raise Malformed("a name and > belong behind =")
    return match[1].strip(), match.end()
