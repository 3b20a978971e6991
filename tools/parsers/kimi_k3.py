"""Kimi K3: tags between special tokens, each argument with its type.

``<|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|><|open|>argument key="code" type="string"<|sep|>1 + 1
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>``. Text stands as it is, everything else as JSON; the
arguments of a call may also be one ``json`` tag.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.tools.parsers.json_call import DECODER, unusable
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect, skip_space, tool_name

SEP = "<|sep|>"


def _opens(tag: str) -> str:
    return f"<|open|>{tag}"


def _closes(tag: str) -> str:
    return f"<|close|>{tag}{SEP}"


OPEN, CLOSE = f"{_opens('tools')}{SEP}", _closes("tools")
SHAPE = (
    f'calls are written {OPEN}{_opens("call")} tool="NAME" index="1"{SEP}{_opens("argument")} key="KEY" type="string"'
    f"{SEP}VALUE{_closes('argument')}{_closes('call')}{CLOSE}"
)
_ATTRIBUTES = r'((?:[ ]\w{1,32}="[^"<>\n]{0,256}")*)'
_CALL = re.compile(rf"\s*{re.escape(_opens('call'))}{_ATTRIBUTES}{re.escape(SEP)}")
_ARGUMENT = re.compile(rf"\s*{re.escape(_opens(''))}(argument|json){_ATTRIBUTES}{re.escape(SEP)}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
MARKS = ("<|open|>", "<|close|>", SEP)


class KimiK3Parser(MarkedParser):
    opening, closing = OPEN, CLOSE
    thought_end = _closes("think")
    shape = SHAPE

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        position = _read_call(text, body, turn)
        while not turn.full and not text.startswith(CLOSE, skip_space(text, position)):
            position = _read_call(text, position, turn)
        return len(text) if turn.full else expect(text, position, CLOSE)


def _read_call(text: str, position: int, turn: TurnBuilder) -> int:
    head = _CALL.match(text, position)
    if head is None:
        raise Malformed(f'{_opens("call")} tool="NAME" belongs behind {OPEN} and behind each call')
    name, position = tool_name(_attributes(head[1]).get("tool", "")), head.end()
    arguments: dict[str, Any] = {}
    while match := _ARGUMENT.match(text, position):
        more, position = _read_argument(text, match)
        if twice := sorted(set(more) & set(arguments)):
            raise Malformed(f"the argument {twice[0][:80]!r} is given twice")
        arguments |= more
    position = expect(text, position, _closes("call"))
    if problem := unusable([name, arguments]):
        raise Malformed(problem)
    turn.call(name, arguments)
    return position


def _read_argument(text: str, head: re.Match[str]) -> tuple[dict[str, Any], int]:
    """One argument, or all of a ``json`` tag, and where its tag ends. Raises `Malformed`."""
    end = text.find(_closes(head[1]), head.end())
    if end < 0:
        raise Malformed(f"{_closes(head[1])} is missing")
    value, attributes = text[head.end() : end], _attributes(head[2])
    if mark := next((mark for mark in MARKS if mark in value), None):
        raise Malformed(f"a value holds {mark}, a mark of the call itself")
    behind = end + len(_closes(head[1]))
    if head[1] == "json":
        values = _json_of(value)
        if not isinstance(values, dict):
            raise Malformed("the arguments must be a JSON object")
        return values, behind
    if not attributes.get("key"):
        raise Malformed("an argument has no key")
    return {attributes["key"]: value if attributes.get("type") == "string" else _json_of(value)}, behind


def _attributes(text: str) -> dict[str, str]:
    pairs = _ATTRIBUTE.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}


def _json_of(text: str) -> Any:
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{text[:80]!r} is not JSON, which every type but string promises") from error
