"""GLM-4.5 and later: ``<tool_call>python\\n<arg_key>code</arg_key>\\n<arg_value>1 + 1</arg_value>\\n</tool_call>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, TurnBuilder, expect, read_marked, skip_space


@dataclass(frozen=True, slots=True)
class PairTags:
    """Names of the tags of a key and of its value."""

    key_tag: str = "arg_key"
    value_tag: str = "arg_value"

    @property
    def key(self) -> str:
        return f"<{self.key_tag}>"

    @property
    def end_key(self) -> str:
        return f"</{self.key_tag}>"

    @property
    def value(self) -> str:
        return f"<{self.value_tag}>"

    @property
    def end_value(self) -> str:
        return f"</{self.value_tag}>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.key, self.end_key, self.value, self.end_value)


OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = PairTags()
MARKS = (OPEN, CLOSE, *TAGS.marks)
SHAPE = "a call is written <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"


class GlmParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            return _read_call(text, body, turn, tools)

        return read_marked(text, OPEN, SHAPE, read)


def _read_call(text: str, body: int, turn: TurnBuilder, tools: Sequence[Mapping[str, Any]]) -> int:
    end = _find(text, CLOSE, body)
    first = text.find(TAGS.key, body, end)
    position = end if first < 0 else first
    name = text[body:position].strip()
    reader = ArgumentReader(name, tools, MARKS)
    position = expect(text, read_pairs(text, position, reader, TAGS), CLOSE)
    turn.call(name, reader.done())
    return position


def read_pairs(text: str, position: int, reader: ArgumentReader, tags: PairTags) -> int:
    """Adds the keys and values that stand at `position`; where the last one ends. Raises `Malformed`."""
    while text.startswith(tags.key, position := skip_space(text, position)):
        key, position = until(text, position + len(tags.key), tags.end_key)
        value, position = until(text, expect(text, position, tags.value), tags.end_value)
        reader.add(key.strip(), value)
    return position


def until(text: str, start: int, mark: str) -> tuple[str, int]:
    """What stands before `mark`, and the place behind it. Raises `Malformed`."""
    end = _find(text, mark, start)
    return text[start:end], end + len(mark)


def _find(text: str, mark: str, start: int) -> int:
    found = text.find(mark, start)
    if found < 0:
        raise Malformed(f"{mark} is missing")
    return found
