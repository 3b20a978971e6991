"""Values as Python or JSON spells them, and as templates mix the two: ``{'a': [1, true, None, "x"]}``."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from penstock.tools.parsers.json_call import MAX_DEPTH
from penstock.tools.parsers.turn import Malformed, expect, skip_space

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]+")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_BREAKS = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"})

ReadScalar = Callable[[str, int], tuple[Any, int]]
"""(text, where a value begins) → (value, its end). Raises `Malformed`."""


def read_literal(text: str, start: int) -> tuple[Any, int]:
    """The literal at `start`, space before it skipped, and its end. Raises `Malformed`."""
    return read_value(text, start, read_scalar, read_text, 0)


def read_value(text: str, start: int, scalar: ReadScalar, key: ReadScalar, depth: int) -> tuple[Any, int]:
    """Lists and objects of what `scalar` and `key` read. Raises `Malformed`."""
    start = skip_space(text, start)
    if depth > MAX_DEPTH:
        raise Malformed(f"it is nested more than {MAX_DEPTH} levels deep")
    if text.startswith("[", start):
        return _read_list(text, start + 1, scalar, key, depth)
    if text.startswith("{", start):
        position = start + 1
        members: dict[str, Any] = {}
        while not text.startswith("}", position := skip_space(text, position)):
            position = skip_space(text, expect(text, position, ",")) if members else position
            name, position = key(text, position)
            if name in members:
                raise Malformed("an object has the same key twice")
            members[name], position = read_value(text, expect(text, position, ":"), scalar, key, depth + 1)
        return members, position + 1
    return scalar(text, start)


def read_scalar(text: str, start: int) -> tuple[Any, int]:
    """A text, a number, or one of the words for true, false and nothing. Raises `Malformed`."""
    if text[start : start + 1] in ('"', "'"):
        return read_text(text, start)
    if number := _NUMBER.match(text, start):
        return _number(number[0]), number.end()
    word = _WORD.match(text, start)
    if word is None or word[0] not in _WORDS:
        raise Malformed(f"{text[start : start + 40]!r} begins no value" if text[start:] else "a value is missing")
    return _WORDS[word[0]], word.end()


def read_text(text: str, start: int) -> tuple[str, int]:
    """A text in quotes; line breaks may stand in it as they are. Raises `Malformed`."""
    match = _TEXT.match(text, start)
    if match is None:
        raise Malformed(
            "a quoted text is not closed" if text[start : start + 1] in ('"', "'") else "quotes are missing"
        )
    quoted = match[0]
    if quoted[0] == '"':  # JSON's escapes first: its halves of surrogate pairs are one character, Python's two
        with contextlib.suppress(ValueError):
            return str(json.loads(quoted, strict=False)), match.end()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return str(ast.literal_eval(quoted.translate(_BREAKS))), match.end()
    except (ValueError, SyntaxError) as error:
        raise Malformed("a text has an escape that means nothing") from error


def _number(text: str) -> int | float:
    # A longer one is no number that anybody means, and Python refuses to read some.
    if len(text) > 400:
        raise Malformed("a number is too long")
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _read_list(text: str, position: int, scalar: ReadScalar, key: ReadScalar, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while not text.startswith("]", position := skip_space(text, position)):
        position = expect(text, position, ",") if items else position
        value, position = read_value(text, position, scalar, key, depth + 1)
        items.append(value)
    return items, position + 1
