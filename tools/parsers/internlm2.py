"""InternLM2 and 2.5: ``<|action_start|><|plugin|>\\n{"name": "python", "arguments": {"code": "1 + 1"}}<|action_end|>``.

Models write ``parameters`` for ``arguments`` too. ``<|action_start|><|interpreter|>`` is another kind of action: a
malformed call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import add_call, arguments_key, read_json
from penstock.tools.parsers.turn import TurnBuilder, expect, read_marked

OPEN, PLUGIN, CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"
SHAPE = f'a call is written {OPEN}{PLUGIN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'


class InternLm2Parser:
    opening, closing = OPEN, CLOSE

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        return read_marked(text, OPEN, SHAPE, _read_call)


def _read_call(text: str, body: int, turn: TurnBuilder) -> int:
    value, end = read_json(text, expect(text, body, PLUGIN))
    end = expect(text, end, CLOSE)
    add_call(turn, value, arguments_key(value, "arguments", "parameters"))
    return end
