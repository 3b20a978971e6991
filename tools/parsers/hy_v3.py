"""Hunyuan 3: pairs of tags as in `glm`, all with a suffix, a name before its own mark, and a section around all calls.

``<tool_calls:opensource>\\n<tool_call:opensource>python<tool_sep:opensource>\\n<arg_key:opensource>code
</arg_key:opensource>\\n<arg_value:opensource>1 + 1</arg_value:opensource>\\n</tool_call:opensource>\\n
</tool_calls:opensource>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.glm import PairTags, read_pairs, until
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import TurnBuilder, expect, read_marked, skip_space

SUFFIX = ":opensource"
OPEN, CLOSE = f"<tool_calls{SUFFIX}>", f"</tool_calls{SUFFIX}>"
CALL, END_CALL, NAME_END = f"<tool_call{SUFFIX}>", f"</tool_call{SUFFIX}>", f"<tool_sep{SUFFIX}>"
TAGS = PairTags(f"arg_key{SUFFIX}", f"arg_value{SUFFIX}")
SHAPE = (
    f"calls are written {OPEN}\n{CALL}NAME{NAME_END}\n{TAGS.key}KEY{TAGS.end_key}\n{TAGS.value}VALUE{TAGS.end_value}\n"
    f"{END_CALL}\n{CLOSE}"
)
Tools = Sequence[Mapping[str, Any]]


class HyV3Parser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            position = _read_call(text, body, turn, tools)
            while not turn.full and not text.startswith(CLOSE, skip_space(text, position)):
                position = _read_call(text, position, turn, tools)
            return len(text) if turn.full else expect(text, position, CLOSE)

        return read_marked(text, OPEN, SHAPE, read)


def _read_call(text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
    name, position = until(text, expect(text, position, CALL), NAME_END)
    reader = ArgumentReader(name.strip(), tools, (OPEN, CLOSE, CALL, END_CALL, NAME_END, *TAGS.marks))
    position = expect(text, read_pairs(text, position, reader, TAGS), END_CALL)
    turn.call(reader.name, reader.done())
    return position
