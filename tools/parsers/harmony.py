"""gpt-oss: messages with a header; one that is addressed to a tool is a call.

``<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "1 + 1"}<|call|>``. The address may
stand before the channel too. Messages without a recipient, thinking among them, are content as they were written.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_arguments
from penstock.tools.parsers.turn import UNREAD, Malformed, Tools, TurnBuilder, expect, skip_space, tool_name

START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
CONSTRAIN = "<|constrain|>"
SHAPE = f"a call is written {CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}{{...}}{CALL}"
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")


class HarmonyParser:
    opening, closing = "", ""
    """Empty: other messages begin as calls do, and engines leave out the text at which they stopped."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        turn = TurnBuilder(SHAPE)
        position = 0
        while not turn.full and (header_end := text.find(MESSAGE, position)) >= 0:
            # What comes before a header is content. The first message of an answer has its ``<|start|>`` in the prompt.
            start = max(position, text.rfind(START, position, header_end))
            turn.say(text[position:start])
            position = _read_message(text, start, header_end, turn)
        turn.say("" if turn.full else text[position:])
        return turn.done()


def _read_message(text: str, start: int, message: int, turn: TurnBuilder) -> int:
    header = text[start:message]
    for mark in (START, CHANNEL, CONSTRAIN):
        header = header.replace(mark, f" {mark} ")
    words = header.split()
    body = message + len(MESSAGE)
    addresses = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    if not addresses:
        match = _END.search(text, body)
        end = match.end() if match else len(text)
        turn.say(text[start:end])
        return end
    try:
        # At most start, role, channel and its name, address, constrain and the type.
        if len(addresses) > 1 or CHANNEL not in words or len(words) > 7:
            raise Malformed("its header needs one channel and one address")
        return _read_call(text, body, addresses[0].removeprefix("functions."), turn)
    except Malformed as problem:
        turn.malformed(f"{problem}{UNREAD}")
        return len(text)


def _read_call(text: str, body: int, name: str, turn: TurnBuilder) -> int:
    arguments, end = read_arguments(text, body, tool_name(name))
    end = expect(text, end, CALL) if text[skip_space(text, end) :] else len(text)
    turn.call(name, arguments)
    return end
