"""GLM-4.5 and later: ``<tool_call>python\\n<arg_key>code</arg_key>\\n<arg_value>1 + 1</arg_value>\\n</tool_call>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, TurnBuilder, expect, read_marked, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
MARKS = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
SHAPE = "a call is written <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"


class GlmParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            return _read_call(text, body, turn, tools)

        return read_marked(text, OPEN, SHAPE, read)


def _read_call(text: str, body: int, turn: TurnBuilder, tools: Sequence[Mapping[str, Any]]) -> int:
    end = _find(text, CLOSE, body)
    first = text.find(KEY, body, end)
    position = end if first < 0 else first
    name = text[body:position].strip()
    reader = ArgumentReader(name, tools, MARKS)
    while text.startswith(KEY, position := skip_space(text, position)):
        key, position = _until(text, position + len(KEY), END_KEY)
        value, position = _until(text, expect(text, position, VALUE), END_VALUE)
        reader.add(key.strip(), value)
    position = expect(text, position, CLOSE)
    turn.call(name, reader.done())
    return position


def _until(text: str, start: int, mark: str) -> tuple[str, int]:
    end = _find(text, mark, start)
    return text[start:end], end + len(mark)


def _find(text: str, mark: str, start: int) -> int:
    found = text.find(mark, start)
    if found < 0:
        raise Malformed(f"{mark} is missing")
    return found
