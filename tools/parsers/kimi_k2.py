"""Kimi K2, K2.5: special tokens around each call and around them all, with an id that results refer to.

``<|tool_calls_section_begin|><|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code": "1 + 1"}
<|tool_call_end|><|tool_calls_section_end|>``; the number counts the calls of a conversation.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import Malformed, SectionParser, Tools, TurnBuilder, expect

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SHAPE = f"calls are written {OPEN}{CALL}functions.NAME:NUMBER{ARGUMENTS}{{...}}{END_CALL}{CLOSE}"
_HEAD = re.compile(rf"\s*((?:functions\.)?([^\s<>{{}}\[\]\"`:]{{1,256}}):\d{{1,9}})\s*{re.escape(ARGUMENTS)}")


class KimiK2Parser(SectionParser):
    opening, closing = OPEN, CLOSE
    shape = SHAPE

    def read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
        head = _HEAD.match(text, expect(text, position, CALL))
        if head is None:
            raise Malformed(f"functions.NAME:NUMBER and {ARGUMENTS} belong behind {CALL}")
        arguments, end = read_arguments(text, head.end(), head[2])
        end = expect(text, end, END_CALL)
        turn.call(head[2], arguments, written_id=head[1])
        return end
