"""Gemma 4: ``<|tool_call>call:python{code:<|"|>1 + 1<|"|>,limits:{seconds:5}}<tool_call|>``, several times.

Texts stand between ``<|"|>`` as they are, keys stand bare (between the same marks where a template writes them so).
"""

from __future__ import annotations

import re
from typing import Any

from penstock.tools.parsers.json_call import unusable
from penstock.tools.parsers.literal import read_scalar, read_text, read_value
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
SHAPE = f"a call is written {OPEN}call:NAME{{KEY:VALUE,...}}{CLOSE}, text as {QUOTE}...{QUOTE}"
_HEAD = re.compile(r"\s*call:\s*([^\s<>{}\[\]\"`:]{1,256})\s*(?=\{)")
_KEY = re.compile(r"[^\s:,<>{}\[\]][^:,<>{}\[\]\n]*(?=:)")


class Gemma4Parser(MarkedParser):
    opening, closing = OPEN, CLOSE
    thought_end = "<channel|>"
    shape = SHAPE

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        head = _HEAD.match(text, body)
        if head is None:
            raise Malformed(f"call:NAME{{ belongs behind {OPEN}")
        arguments, end = read_value(text, head.end(), _read_scalar, _read_key, 0)
        end = expect(text, end, CLOSE)
        if problem := unusable([head[1], arguments]):
            raise Malformed(problem)
        turn.call(head[1], arguments)
        return end


def _read_scalar(text: str, start: int) -> tuple[Any, int]:
    if not text.startswith(QUOTE, start):
        return read_scalar(text, start)
    end = text.find(QUOTE, start + len(QUOTE))
    if end < 0:
        raise Malformed(f"a text is not closed by {QUOTE}")
    return text[start + len(QUOTE) : end], end + len(QUOTE)


def _read_key(text: str, start: int) -> tuple[str, int]:
    if text.startswith(QUOTE, start):
        return _read_scalar(text, start)
    if text.startswith(('"', "'"), start):
        return read_text(text, start)
    match = _KEY.match(text, start)
    if match is None:
        raise Malformed("a key and : belong before each value")
    return match[0].rstrip(), match.end()
