"""Kimi K3: tags between special tokens, each argument with its type.

``<|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|><|open|>argument key="code" type="string"<|sep|>1 + 1
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>``. Text stands as it is, everything else as JSON; the
arguments of a call may also be one ``json`` tag.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.tools.parsers.json_call import json_of, unusable
from penstock.tools.parsers.turn import Malformed, SectionParser, Tools, TurnBuilder, expect, tool_name, until

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
PROMISE = "every type but string"


class KimiK3Parser(SectionParser):
    opening, closing = OPEN, CLOSE
    thought_end = _closes("think")
    shape = SHAPE

    def read_call(self, text: str, position: int, turn: TurnBuilder, tools: Tools) -> int:
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
    value, behind = until(text, head.end(), _closes(head[1]))
    attributes = _attributes(head[2])
    if mark := next((mark for mark in MARKS if mark in value), None):
        raise Malformed(f"a value holds {mark}, a mark of the call itself")
    if head[1] == "json":
        values = json_of(value, PROMISE)
        if not isinstance(values, dict):
            raise Malformed("the arguments must be a JSON object")
        return values, behind
    if not attributes.get("key"):
        raise Malformed("an argument has no key")
    return {attributes["key"]: value if attributes.get("type") == "string" else json_of(value, PROMISE)}, behind


def _attributes(text: str) -> dict[str, str]:
    pairs = _ATTRIBUTE.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
