"""Muse Glimmer: messages with a recipient, as gpt-oss has them; one to a tool holds calls as in `invoke`.

`` to=python<|message|><atem:function_calls>\\n<atem:invoke name="python">\\n<atem:parameter name="code">1 + 1
</atem:parameter>\\n</atem:invoke>\\n</atem:function_calls>``, messages apart by ``<|eom|><|start|>assistant``. What
stands in a message to ``self`` (thinking) or ``user`` is content, whatever it looks like.
"""

from __future__ import annotations

import re
from functools import partial

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.invoke import InvokeParser
from penstock.tools.parsers.turn import NAME, Tools, TurnBuilder, read_each

_HEADER = re.compile(rf"(?:<\|start\|>assistant)?[ ]?to=({NAME})<\|message\|>")
_END = re.compile(r"<\|(?:eom|eot)\|>|(?=<\|start\|>)")


class MuseGlimmerParser:
    opening, closing = "", ""
    """A call begins with the header of its message, as every other message does."""

    def __init__(self) -> None:
        self._calls = InvokeParser("atem:function_calls", "atem:")

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        return read_each(text, _HEADER, self._calls.shape, partial(self._read_message, tools=tools))

    def _read_message(self, text: str, header: re.Match[str], turn: TurnBuilder, tools: Tools) -> int:
        end = _END.search(text, header.end())
        position = end.end() if end else len(text)
        if header[1] in ("self", "user"):
            turn.say(text[header.start() : position])
            return position
        parsed = self._calls.parse(text[header.end() : end.start() if end else len(text)], tools)
        turn.say(parsed.content)
        for call in parsed.calls:
            turn.add(call)
        # Nothing is read behind a malformed call.
        return len(text) if any(call.error for call in parsed.calls) else position
