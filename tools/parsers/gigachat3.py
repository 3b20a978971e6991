"""GigaChat 3.1: ``<|function_call|>{"name": "python", "arguments": {"code": "1 + 1"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import read_call
from penstock.tools.parsers.turn import read_marked

OPEN = "<|function_call|>"
SHAPE = f'a call is written {OPEN}{{"name": ..., "arguments": {{...}}}}'


class GigaChat3Parser:
    opening, closing = OPEN, ""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, read_call)
