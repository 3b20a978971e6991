"""Apertus: ``<|tools_prefix|>[{"python": {"code": "1 + 1"}}, ...]<|tools_suffix|>``, each call an object of one key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import named_calls, read_json
from penstock.tools.parsers.turn import Malformed, TurnBuilder, expect, read_marked

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
SHAPE = f"calls are written {OPEN}[{{NAME: {{...}}}}, ...]{CLOSE}"


class ApertusParser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_calls)


def _read_calls(text: str, body: int, turn: TurnBuilder) -> int:
    values, end = read_json(text, body)
    calls = named_calls([_named(value) for value in values] if isinstance(values, list) else values)
    end = expect(text, end, CLOSE)
    for name, arguments in calls:
        turn.call(name, arguments)
    return end


def _named(value: Any) -> dict[str, Any]:
    """``{"python": {…}}`` with the keys of other syntaxes. Raises `Malformed`."""
    if not isinstance(value, dict) or len(value) != 1:
        raise Malformed("a call is a JSON object with the name of its tool as the only key")
    ((name, arguments),) = value.items()
    return {"name": name, "arguments": arguments}
