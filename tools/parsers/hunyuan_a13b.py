"""Hunyuan A13B and Apriel: ``<tool_calls>[{"name": "python", "arguments": {"code": "1 + 1"}}, ...]</tool_calls>``.

MiniMax M1 writes the objects one after the other, without a list. Apriel's may have an ``id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import named_calls, read_call_list, read_json
from penstock.tools.parsers.turn import MAX_CALLS, TurnBuilder, expect, read_marked, skip_space

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
SHAPE = f'calls are written {OPEN}[{{"name": ..., "arguments": {{...}}}}, ...]{CLOSE}'
KEYS, ALSO = ("name", "arguments"), ("id",)


class HunyuanA13bParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_calls)


def _read_calls(text: str, body: int, turn: TurnBuilder) -> int:
    if text.startswith("{", skip_space(text, body)):
        values: list[Any] = []
        end = body
        while len(values) <= MAX_CALLS and text.startswith("{", skip_space(text, end)):
            value, end = read_json(text, end)
            values.append(value)
        calls = named_calls(values, KEYS, ALSO)
    else:
        calls, end = read_call_list(text, body, KEYS, ALSO)
    end = expect(text, end, CLOSE)
    for name, arguments in calls:
        turn.call(name, arguments)
    return end
