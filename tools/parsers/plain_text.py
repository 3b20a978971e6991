"""Arguments written as plain text between tags: their types stand in the tool's schema, not in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.arguments import ArgumentSchema, type_of
from penstock.tools.parsers.json_call import DECODER, unusable
from penstock.tools.parsers.literal import read_literal
from penstock.tools.parsers.turn import Malformed, tool_name

_WORDS = {"True": True, "False": False, "None": None}
"""Python's spelling, which templates write if they print a value as it is."""


class ArgumentReader:
    """The arguments of one call, one after the other."""

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> None:
        """`marks` are the syntax's own: a value that holds one cannot be distinguished from a broken call."""
        self.name = tool_name(name)
        self._schema = argument_schema(name, tools)
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self.arguments: dict[str, Any] = {}

    def add(self, key: str, text: str) -> None:
        """`text` with the type that the schema says. Raises `Malformed`."""
        self.add_value(key, text, typed(text, self._schema.types(key)))

    def add_value(self, key: str, text: str, value: Any) -> None:
        """`value`, which was written as `text`. Raises `Malformed`."""
        if not key or key in self.arguments:
            raise Malformed(f"the argument {key[:80]!r} is given twice" if key else "an argument has no name")
        if match := self._mark.search(key) or self._mark.search(text):
            raise Malformed(f"the argument {key[:80]!r} holds {match[0]}, a mark of the call itself")
        self.arguments[key] = value

    def done(self) -> dict[str, Any]:
        """Raises `Malformed`."""
        if problem := unusable([self.name, self.arguments]):
            raise Malformed(problem)
        return self.arguments


def typed(text: str, types: set[str]) -> Any:
    """`text` as a value of one of the JSON `types`; what does not fit stays text, for the argument check to report.

    Where the schema takes text, text it is, but for ``null`` if that is allowed too. Without types: what is a
    whole JSON value other than a text, else the text.
    """
    if "string" in types:
        nothing = "null" in types and text.strip() in ("null", "None")
        return None if nothing else text
    value = _json_or_text(text)
    if isinstance(value, str) and types & {"object", "array"}:
        value = _literal_or_text(text)
    return text if isinstance(value, str) or (types and type_of(value) not in types) else value


def _json_or_text(text: str) -> Any:
    stripped = text.strip()
    if stripped in _WORDS:
        return _WORDS[stripped]
    try:
        value = DECODER.decode(stripped)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _literal_or_text(text: str) -> Any:
    """Lists and objects as templates write them that print a value as Python does."""
    try:
        value, end = read_literal(text, 0)
        return text if text[end:].strip() else value
    except Malformed:
        return text


def argument_schema(name: str, tools: Sequence[Mapping[str, Any]]) -> ArgumentSchema:
    """Return the schema of the tool `name`; one without arguments if the tool is unknown."""
    schemas = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    return ArgumentSchema(next(schemas, None))
