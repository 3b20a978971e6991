"""Calls as a list of Python: ``[python(code="1 + 1"), search(query='x', topk=3)]``; Llama 4, Gemma 3, ToolACE.

LFM2 and LFM2.5 write the list between marks: ``<|tool_call_start|>[…]<|tool_call_end|>``.

The list is the whole answer, thoughts before it aside: so the prompts of these models have it, and so vLLM reads it. A
list with words before or behind it is content, as one that a model quotes. An answer that begins as a list of calls
does, ``[NAME(KEY=`` or ``[NAME()``, and cannot be read is a malformed call.

Values are read as Python or JSON spells them. Templates write more than that, and it is read too: a text whose quotes
are not escaped (Llama 4: ``x="say "hi""``) or that has none (ToolACE: ``x=1 < 2``) continues to the next ``, KEY=`` or
the end of its call, and a quoted value is what its schema says if that takes no text. A text that holds such an
end cannot be distinguished from one.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.tools.arguments import type_of
from penstock.tools.parsers.base import ParsedTurn
from penstock.tools.parsers.json_call import unusable
from penstock.tools.parsers.literal import read_literal, read_text
from penstock.tools.parsers.plain_text import argument_schema
from penstock.tools.parsers.turn import (
    MAX_CALLS,
    THOUGHT,
    UNREAD,
    Malformed,
    MarkedParser,
    NamedCall,
    Tools,
    TurnBuilder,
    expect,
    skip_space,
)

SHAPE = "calls are written [NAME(KEY=VALUE, ...), ...], with nothing before or behind them"
_NAME = r"[A-Za-z_][\w.\-]{0,255}"
_KEY = r"[^\W\d]\w{0,255}"
_LIST = re.compile(rf"\s*(?:<\|python_start\|>\s*)?\[(?=\s{{0,32}}{_NAME}\(\s{{0,32}}(?:{_KEY}\s{{0,32}}=|\)))")
_MARKS = re.compile(r"(?:\s*<(?:\|[^\s<>|]{1,64}\||/s|eos|end_of_turn)>)*\s*\Z")
"""Special tokens that end an answer, and Llama 4's ``<|python_end|>``."""
_HEAD = re.compile(rf"\s*({_NAME})\(")
_ARGUMENT = re.compile(rf"\s*({_KEY})\s*=\s*")
_END = rf"(?=\s{{0,32}}(?:,\s{{0,32}}{_KEY}\s{{0,32}}=|\)\s{{0,32}}(?:\]|,\s{{0,32}}{_NAME}\()))"
"""End of a value: the next argument, the last call's end, or the next call."""
_UNQUOTED = re.compile(r"[^\n]*?" + _END)
_ENDS = {quote: re.compile(quote + _END) for quote in ("'", '"')}


class PythonicParser:
    opening, closing = "", ""

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        turn, starts, problem = TurnBuilder(SHAPE), _starts(text), ""
        for start in starts:
            problem, match = "", _LIST.match(text, start)
            if match is None:
                continue
            try:
                calls, end = _read_list(text, match.end(), tools)
            except Malformed as error:
                problem = str(error)
                continue
            if _MARKS.match(text, end):  # else other text stands behind the list
                turn.say(text[:start])
                turn.add_named(calls)
                turn.say(text[end:])
                return turn.done()
        turn.say(text[: starts[-1]] if problem else text)
        if problem:
            turn.malformed(f"{problem}{UNREAD}")
        return turn.done()


class Lfm2Parser(MarkedParser):
    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    shape = f"calls are written {opening}[NAME(KEY=VALUE, ...), ...]{closing}"

    def read(self, text: str, body: int, turn: TurnBuilder, tools: Tools) -> int:
        calls, end = _read_list(text, expect(text, body, "["), tools)
        end = expect(text, end, self.closing)
        turn.add_named(calls)
        return end


def _starts(text: str) -> list[int]:
    """Return the places where an answer may begin: with the text, or behind a thought. A value may spell ``</think>``
    too, so a thought ends at the first one or at the last one; an error is reported of the last place alone.
    """
    if THOUGHT not in text:
        return [0]
    behind = [text.find(THOUGHT) + len(THOUGHT), text.rfind(THOUGHT) + len(THOUGHT)]
    return list(dict.fromkeys([0, *behind]))


def _read_list(text: str, position: int, tools: Tools) -> tuple[list[NamedCall], int]:
    """The calls of a list behind its ``[``, and its end. Raises `Malformed`."""
    calls: list[NamedCall] = []
    while not text.startswith("]", position := skip_space(text, position)):
        if len(calls) > MAX_CALLS:
            raise Malformed(f"a list has more than {MAX_CALLS} calls")
        name, arguments, position = _read_call(text, expect(text, position, ",") if calls else position, tools)
        calls.append((name, arguments))
    if not calls:
        raise Malformed("the list of calls is empty")
    return calls, position + 1


def _read_call(text: str, position: int, tools: Tools) -> tuple[str, dict[str, Any], int]:
    head = _HEAD.match(text, position)
    if head is None:
        raise Malformed("a call begins with NAME(")
    schema, position = argument_schema(head[1], tools), head.end()
    arguments: dict[str, Any] = {}
    while not text.startswith(")", position := skip_space(text, position)):
        argument = _ARGUMENT.match(text, expect(text, position, ",") if arguments else position)
        if argument is None:
            raise Malformed("arguments are written KEY=VALUE")
        if argument[1] in arguments:
            raise Malformed(f"the argument {argument[1][:80]!r} is given twice")
        arguments[argument[1]], position = _read_argument(text, argument.end(), schema.types(argument[1]))
    if problem := unusable([head[1], arguments]):
        raise Malformed(problem)
    return head[1], arguments, position + 1


def _read_argument(text: str, start: int, types: set[str]) -> tuple[Any, int]:
    quote = text[start : start + 1]
    if quote in _ENDS:
        value, end = _read_quoted(text, start, quote)
        return _of_type(value, text[start + 1 : end - 1], types), end
    try:
        value, end = read_literal(text, start)
        is_whole = text.startswith((",", ")"), skip_space(text, end))
    except Malformed as problem:
        return _read_unquoted(text, start, types, problem)
    if is_whole and not (isinstance(value, bool | int | float) and types == {"string"}):
        return value, end
    return _read_unquoted(text, start, types, Malformed("text stands behind a value"))


def _read_quoted(text: str, start: int, quote: str) -> tuple[str, int]:
    """Return the string that Python reads if an argument can end behind it, else the text up to such an end; and its
    end.
    """
    try:
        value, end = read_text(text, start)
        if text.startswith((",", ")"), skip_space(text, end)):
            return value, end
    except Malformed:
        pass
    match = _ENDS[quote].search(text, start + 1)
    if match is None:
        raise Malformed("a quoted text is not closed")
    return text[start + 1 : match.start()], match.end()


def _read_unquoted(text: str, start: int, types: set[str], problem: Malformed) -> tuple[Any, int]:
    """Text that was meant to have quotes. Raises `problem` if it cannot be that."""
    match = _UNQUOTED.match(text, start)
    if match is None or not match[0] or match[0][0] in "[{" or (types and "string" not in types):
        raise problem
    return match[0], match.end()


def _of_type(value: str, written: str, types: set[str]) -> Any:
    """Quoted text as its schema has it: some templates put quotes around every value, and escape nothing in it.

    `written` is the text between the quotes, `value` what Python reads there.
    """
    if not types or "string" in types:
        return value
    for text in (value, written):
        try:
            literal, end = read_literal(text, 0)
        except Malformed:
            continue
        if not text[end:].strip() and type_of(literal) in types:
            return literal
    return value
