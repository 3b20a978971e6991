"""Calls as ``<invoke name="python"><parameter name="code">1 + 1</parameter></invoke>``, in a section of their own.

minimax_m2     <minimax:tool_call>           MiniMax M2, M2.1 and M2.5; types by the schema
deepseek_v32   <｜DSML｜function_calls>      each parameter says its type
deepseek_v4    <｜DSML｜tool_calls>
"""

from __future__ import annotations

import re

from penstock.tools.parsers.json_call import json_of
from penstock.tools.parsers.plain_text import ArgumentReader
from penstock.tools.parsers.turn import Malformed, SectionParser, Tools, TurnBuilder, expect, skip_space, until

_ATTRIBUTE = r"\s+name=\"([^\"<>\n]{1,256})\""


class InvokeParser(SectionParser):
    """`section` and `prefix` stand before a tag's name: ``<minimax:tool_call>`` and ``<｜DSML｜invoke …>``.

    `says_type`: a parameter says whether it is text, ``string="true"``, or JSON, ``string="false"``. Else its schema
    does.
    """

    def __init__(self, section: str, prefix: str = "", *, says_type: bool = False) -> None:
        self.opening, self.closing = f"<{section}>", f"</{section}>"
        self._says_type = says_type
        self._invoke, self._end_invoke = f"<{prefix}invoke", f"</{prefix}invoke>"
        parameter, self._end_parameter = f"<{prefix}parameter", f"</{prefix}parameter>"
        kind = ' string="true|false"' if says_type else ""
        self.shape = (
            f'calls are written {self.opening}\n{self._invoke} name="NAME">\n'
            f'{parameter} name="KEY"{kind}>VALUE{self._end_parameter}\n{self._end_invoke}\n{self.closing}'
        )
        type_pattern = r"\s+string=\"(true|false)\"" if says_type else ""
        self._head = re.compile(re.escape(self._invoke) + _ATTRIBUTE + r"\s*>")
        self._parameter = re.compile(re.escape(parameter) + _ATTRIBUTE + type_pattern + r"\s*>")
        self._marks = (
            *(self.opening, self.closing),
            *(self._invoke, parameter, self._end_invoke, self._end_parameter),
        )

    def read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
        head = self._head.match(text, start := skip_space(text, position))
        if head is None:
            missing = f'{self._invoke} name="NAME">'
            raise Malformed(f"other text stands where {missing} belongs" if text[start:] else f"{missing} is missing")
        reader = ArgumentReader(head[1], tools, self._marks)
        position = head.end()
        while parameter := self._parameter.match(text, skip_space(text, position)):
            value, position = until(text, parameter.end(), self._end_parameter)
            if self._says_type:
                reader.add_value(
                    parameter[1], value, value if parameter[2] == "true" else json_of(value, 'string="false"')
                )
            else:
                reader.add(parameter[1], value)
        position = expect(text, position, self._end_invoke)
        turn.call(head[1], reader.done())
        return position


class MiniMaxM2Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__("minimax:tool_call")


class DeepSeekV32Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__("｜DSML｜function_calls", "｜DSML｜", says_type=True)


class DeepSeekV4Parser(InvokeParser):
    def __init__(self) -> None:
        super().__init__("｜DSML｜tool_calls", "｜DSML｜", says_type=True)
