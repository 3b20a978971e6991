"""Calls as ``<invoke name="python"><parameter name="code">1 + 1</parameter></invoke>``, in a section of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import DECODER
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, TurnBuilder, expect, read_marked, skip_space

Tools = Sequence[Mapping[str, Any]]
_ATTRIBUTE = r"\s+name=\"([^\"<>\n]{1,256})\""


@dataclass(frozen=True, slots=True)
class InvokeSyntax:
    """`section` and `prefix` stand before a tag's name: ``<minimax:tool_call>`` and ``<｜DSML｜invoke …>``."""

    section: str
    prefix: str = ""
    says_type: bool = False
    """A parameter says whether it is text: ``string="true"``, or JSON: ``string="false"``. Else its schema does."""

    @property
    def opening(self) -> str:
        return f"<{self.section}>"

    @property
    def closing(self) -> str:
        return f"</{self.section}>"

    @property
    def shape(self) -> str:
        kind = ' string="true|false"' if self.says_type else ""
        parameter = f'{self.opens("parameter")} name="KEY"{kind}>VALUE{self.closes("parameter")}'
        call = f'{self.opens("invoke")} name="NAME">\n{parameter}\n{self.closes("invoke")}'
        return f"calls are written {self.opening}\n{call}\n{self.closing}"

    def opens(self, tag: str) -> str:
        """Without its attributes."""
        return f"<{self.prefix}{tag}"

    def closes(self, tag: str) -> str:
        return f"</{self.prefix}{tag}>"


class InvokeParser:
    """Reads one `InvokeSyntax`."""

    def __init__(self, syntax: InvokeSyntax) -> None:
        self.opening, self.closing = syntax.opening, syntax.closing
        self._syntax = syntax
        kind = r"\s+string=\"(true|false)\"" if syntax.says_type else ""
        self._invoke = re.compile(re.escape(syntax.opens("invoke")) + _ATTRIBUTE + r"\s*>")
        self._parameter = re.compile(re.escape(syntax.opens("parameter")) + _ATTRIBUTE + kind + r"\s*>")
        tags = [syntax.opens("invoke"), syntax.opens("parameter"), syntax.closes("invoke"), syntax.closes("parameter")]
        self._marks = (syntax.opening, syntax.closing, *tags)

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        def read(text: str, body: int, turn: TurnBuilder) -> int:
            return self._read_section(text, body, turn, tools)

        return read_marked(text, self.opening, self._syntax.shape, read)

    def _read_section(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        position = self._read_call(text, body, turn, tools)
        while not turn.full and not text.startswith(self.closing, skip_space(text, position)):
            position = self._read_call(text, position, turn, tools)
        return len(text) if turn.full else expect(text, position, self.closing)

    def _read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
        head = self._invoke.match(text, start := skip_space(text, position))
        if head is None:
            missing = f'{self._syntax.opens("invoke")} name="NAME">'
            raise Malformed(f"other text stands where {missing} belongs" if text[start:] else f"{missing} is missing")
        reader = ArgumentReader(head[1], tools, self._marks)
        position = head.end()
        end = self._syntax.closes("parameter")
        while found := self._parameter.match(text, skip_space(text, position)):
            close = text.find(end, found.end())
            if close < 0:
                raise Malformed(f"{end} is missing")
            value = text[found.end() : close]
            if self._syntax.says_type:
                reader.add_value(found[1], value, value if found[2] == "true" else _json_of(value))
            else:
                reader.add(found[1], value)
            position = close + len(end)
        position = expect(text, position, self._syntax.closes("invoke"))
        turn.call(head[1], reader.done())
        return position


def _json_of(text: str) -> Any:
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise Malformed(f'{text[:80]!r} is no JSON, which string="false" promises') from error
