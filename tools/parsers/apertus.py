"""Apertus: ``<|tools_prefix|>[{"python": {"code": "1 + 1"}}, ...]<|tools_suffix|>``, each call an object of one key."""

from __future__ import annotations

from typing import Any

from penstock.tools.parsers.json_call import named_calls, read_json
from penstock.tools.parsers.turn import Malformed, MarkedParser, Tools, TurnBuilder, expect


class ApertusParser(MarkedParser):
    opening, closing = "<|tools_prefix|>", "<|tools_suffix|>"
    thought_end = ""  # its models call tools in the middle of a thought
    shape = f"calls are written {opening}[{{NAME: {{...}}}}, ...]{closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        values, end = read_json(text, body)
        calls = named_calls([_named(value) for value in values] if isinstance(values, list) else values)
        end = expect(text, end, self.closing)
        turn.add_named(calls)
        return end


def _named(value: Any) -> dict[str, Any]:
    """``{"python": {…}}`` with the keys of other syntaxes. Raises `Malformed`."""
    if not isinstance(value, dict) or len(value) != 1:
        raise Malformed("a call is a JSON object with the name of its tool as the only key")
    ((name, arguments),) = value.items()
    return {"name": name, "arguments": arguments}
