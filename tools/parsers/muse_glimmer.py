"""Muse Glimmer: messages with a recipient, as gpt-oss has them; one to a tool holds calls as in `invoke`.

`` to=python<|message|><atem:function_calls>\\n<atem:invoke name="python">\\n<atem:parameter name="code">1 + 1
</atem:parameter>\\n</atem:invoke>\\n</atem:function_calls>``, messages apart by ``<|eom|><|start|>assistant``. What
stands in a message to ``self`` (thinking) or ``user`` is content, whatever it looks like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.invoke import InvokeParser
from penstock.tools.parsers.turn import NAME, TurnBuilder

_HEADER = re.compile(rf"(?:<\|start\|>assistant)?[ ]?to=({NAME})<\|message\|>")
_END = re.compile(r"<\|(?:eom|eot)\|>|(?=<\|start\|>)")


class MuseGlimmerParser:
    opening, closing = "", ""
    """A call begins with the header of its message, as every other message does."""

    def __init__(self) -> None:
        self._calls = InvokeParser("atem:function_calls", "atem:")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        turn = TurnBuilder(self._calls.shape)
        position = 0
        while not turn.full and (header := _HEADER.search(text, position)):
            turn.say(text[position : header.start()])
            end = _END.search(text, header.end())
            position = end.end() if end else len(text)
            body = text[header.end() : end.start() if end else len(text)]
            if header[1] in ("self", "user"):
                turn.say(text[header.start() : position])
            elif not self._add(body, tools, turn):
                return turn.done()
        turn.say("" if turn.full else text[position:])
        return turn.done()

    def _add(self, body: str, tools: Sequence[Mapping[str, Any]], turn: TurnBuilder) -> bool:
        """The calls of one message; False where one is malformed, and nothing behind it is read."""
        parsed = self._calls.parse(body, tools)
        turn.say(parsed.content)
        for call in parsed.calls:
            turn.add(call)
        return not any(call.error for call in parsed.calls)
