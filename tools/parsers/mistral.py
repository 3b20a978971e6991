"""Mistral: ``[TOOL_CALLS][{"name": "python", "arguments": {"code": "1 + 1"}, "id": "a1b2c3d4e"}]``, a list of calls;

since tokenizer version 11 ``[TOOL_CALLS]python[CALL_ID]a1b2c3d4e[ARGS]{"code": "1 + 1"}``, once per call and with or
without an id. Both are read, whichever the model writes; results are written with the id.
"""

from __future__ import annotations

import re

from penstock.tools.parsers.json_call import add_call, read_arguments, read_json
from penstock.tools.parsers.turn import NAME, Malformed, MarkedParser, Tools, TurnBuilder, skip_space

OPEN = "[TOOL_CALLS]"
SHAPE = 'calls are written [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]NAME[ARGS]{...}'
_HEAD = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*(\w{{1,64}})\s*)?\[ARGS\]")


class MistralParser(MarkedParser):
    opening, closing = OPEN, ""
    thought_end = "[/THINK]"
    shape = SHAPE

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        if text.startswith("[", start := skip_space(text, body)) and not text.startswith(OPEN, start):
            return _read_list(text, start, turn)
        head = _HEAD.match(text, body)
        if head is None:
            raise Malformed("neither a list of calls nor NAME[ARGS] follows [TOOL_CALLS]")
        arguments, end = read_arguments(text, head.end(), head[1])
        turn.call(head[1], arguments, written_id=head[2] or "")
        return end


def _read_list(text: str, start: int, turn: TurnBuilder) -> int:
    values, end = read_json(text, start)
    if not values:
        raise Malformed("the list of calls is empty")
    for value in values:
        add_call(turn, value, also=("id",))
    return end
