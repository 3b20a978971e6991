"""Cohere Command R7B, Command A and later, which number the calls of a conversation:

``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "python", "parameters": {"code": "1 + 1"}}, ...]<|END_ACTION|>``.

Results are written with that number, so the ones of a turn must count up by one; a call may leave it out. A lone
object in place of the list is one call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.json_call import named_calls, read_json
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect

NUMBER = "tool_call_id"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,2}")
"""A conversation has fewer calls than a thousand: a result is written behind as many as its number says."""


class CohereParser(MarkedParser):
    opening, closing = "<|START_ACTION|>", "<|END_ACTION|>"
    thought_end = "<|END_THINKING|>"
    shape = (
        f'calls are written {opening}[{{"tool_call_id": "NUMBER", "tool_name": ..., "parameters": {{...}}}}, ...]'
        f"{closing}"
    )

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        values, end = read_json(text, body)
        values = [values] if isinstance(values, dict) else values
        calls = named_calls(values, ("tool_name", "parameters"), also=(NUMBER,))
        end = expect(text, end, self.closing)
        for (name, arguments), number in zip(calls, _numbers(values), strict=True):
            turn.call(name, arguments, written_id=number)
        return end


def _numbers(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Raises `Malformed`."""
    numbers = [value[NUMBER] for value in values if NUMBER in value]
    if not numbers:
        return [""] * len(values)
    if len(numbers) < len(values) or not all(isinstance(one, str) and _NUMBER.fullmatch(one) for one in numbers):
        raise Malformed(f'"{NUMBER}" must be a number in quotes, of each call or of none')
    if any(int(one) != int(numbers[0]) + at for at, one in enumerate(numbers)):
        raise Malformed(f'"{NUMBER}" must count up by one')
    return numbers
