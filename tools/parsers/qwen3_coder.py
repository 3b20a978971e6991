"""Qwen3-Coder and Seed-OSS: XML-like tags; Qwen's values stand on lines of their own.

<tool_call>\\n<function=python>\\n<parameter=code>\\n1 + 1\\n</parameter>\\n</function>\\n</tool_call>
<seed:tool_call>\\n<function=python>\\n<parameter=code>1 + 1</parameter>\\n</function>\\n</seed:tool_call>
"""

from __future__ import annotations

import re
from typing import ClassVar

from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect, skip_space, until

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_WORD = re.compile(r"([^<>\r\n]+)>")


class Qwen3CoderParser(MarkedParser):
    opening, closing = "<tool_call>", "</tool_call>"
    around: ClassVar[str] = "\n"
    """Stands before and after a value, and is not part of it."""

    def __init__(self) -> None:
        self.shape = (
            f"a call is written {self.opening}\n<function=NAME>\n<parameter=KEY>{self.around}VALUE{self.around}"
            f"</parameter>\n</function>\n{self.closing}"
        )
        self._marks = (self.opening, self.closing, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        name, position = _read_word(text, expect(text, body, FUNCTION))
        reader = ArgumentReader(name, tools, self._marks)
        while text.startswith(PARAMETER, position := skip_space(text, position)):
            key, start = _read_word(text, position + len(PARAMETER))
            value, position = until(text, start, END_PARAMETER)
            reader.add(key, value.removeprefix(self.around).removesuffix(self.around))
        arguments = reader.done()
        position = expect(text, expect(text, position, END_FUNCTION), self.closing)
        turn.call(name, arguments)
        return position


class SeedOssParser(Qwen3CoderParser):
    opening, closing, around = "<seed:tool_call>", "</seed:tool_call>", ""
    thought_end = "</seed:think>"


def _read_word(text: str, start: int) -> tuple[str, int]:
    """Returns the text before ``>``, and the position behind it."""
    match = _WORD.match(text, start)
    if match is None:
        raise Malformed("a name and > belong behind =")
    return match[1].strip(), match.end()
