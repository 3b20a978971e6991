"""GLM-4.5 and later, and Hunyuan 3: pairs of tags of a key and its value.

glm     <tool_call>python\\n<arg_key>code</arg_key>\\n<arg_value>1 + 1</arg_value>\\n</tool_call>
hy_v3   the same with a suffix (``<arg_key:opensource>``), a name before its own mark, and a section around all calls:
        <tool_calls:opensource>\\n<tool_call:opensource>python<tool_sep:opensource>\\n … </tool_call:opensource>\\n …
"""

from __future__ import annotations

from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import MarkedParser, SectionParser, Tools, TurnBuilder, expect, skip_space, until


class PairTags:
    """The tags of a key and of its value, and those of a call."""

    def __init__(self, suffix: str = "") -> None:
        self.key, self.end_key = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self.value, self.end_value = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        self.call, self.end_call = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        self.marks = (self.key, self.end_key, self.value, self.end_value, self.call, self.end_call)
        self.pair_shape = f"{self.key}KEY{self.end_key}\n{self.value}VALUE{self.end_value}\n{self.end_call}"

    def read_call(self, text: str, position: int, reader: ArgumentReader, turn: TurnBuilder) -> int:
        """Adds the call whose pairs and end stand at `position`; returns its end. Raises `Malformed`."""
        while text.startswith(self.key, position := skip_space(text, position)):
            key, position = until(text, position + len(self.key), self.end_key)
            value, position = until(text, expect(text, position, self.value), self.end_value)
            reader.add(key.strip(), value)
        position = expect(text, position, self.end_call)
        turn.call(reader.name, reader.done())
        return position


TAGS, HY_TAGS = PairTags(), PairTags(":opensource")


class GlmParser(MarkedParser):
    opening, closing = TAGS.call, TAGS.end_call
    shape = f"a call is written {TAGS.call}NAME\n{TAGS.pair_shape}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        name = until(text, body, self.closing)[0].partition(TAGS.key)[0]
        return TAGS.read_call(text, body + len(name), ArgumentReader(name.strip(), tools, TAGS.marks), turn)


class HyV3Parser(SectionParser):
    opening, closing = "<tool_calls:opensource>", "</tool_calls:opensource>"
    thought_end = "</think:opensource>"
    name_end = "<tool_sep:opensource>"
    shape = f"calls are written {opening}\n{HY_TAGS.call}NAME{name_end}\n{HY_TAGS.pair_shape}\n{closing}"

    def read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
        name, position = until(text, expect(text, position, HY_TAGS.call), self.name_end)
        reader = ArgumentReader(name.strip(), tools, (self.opening, self.closing, self.name_end, *HY_TAGS.marks))
        return HY_TAGS.read_call(text, position, reader, turn)
