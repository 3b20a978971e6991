"""Arguments written as plain text between tags: their types stand in the tool's schema, not in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tools.parsers.json_call import DECODER, unusable
from penstock.tools.parsers.literal import read_literal
from penstock.tools.parsers.turn import Malformed, tool_name

_WORDS = {"True": True, "False": False, "None": None}
"""Python's spelling, which templates write where they print a value as it is."""

_NAMES: Mapping[type, str] = {str: "string", dict: "object", list: "array"}


class ArgumentReader:
    """The arguments of one call, one after the other."""

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> None:
        """`marks` are the syntax's own: a value that holds one cannot be distinguished from a broken call."""
        self.name = tool_name(name)
        self._properties = properties_of(name, tools)
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self.arguments: dict[str, Any] = {}

    def add(self, key: str, text: str) -> None:
        """`text` with the type that the schema says. Raises `Malformed`."""
        self.add_value(key, text, typed(text, self._properties.get(key)))

    def add_value(self, key: str, text: str, value: Any) -> None:
        """`value`, which was written as `text`. Raises `Malformed`."""
        if not key or key in self.arguments:
            raise Malformed(f"the argument {key[:80]!r} is given twice" if key else "an argument has no name")
        if found := self._mark.search(key) or self._mark.search(text):
            raise Malformed(f"the argument {key[:80]!r} holds {found[0]}, a mark of the call itself")
        self.arguments[key] = value

    def done(self) -> dict[str, Any]:
        """Raises `Malformed`."""
        if problem := unusable([self.name, self.arguments]):
            raise Malformed(problem)
        return self.arguments


def typed(text: str, schema: Any = None) -> Any:
    """`text` as the schema of its argument has it; what does not fit stays text, for the argument check to report.

    Where the schema takes text, text it is, but for ``null`` where that is allowed too. Without a schema: what is a
    whole JSON value other than a text, else the text.
    """
    types = types_of(schema)
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


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else _NAMES.get(type(value), "object")


def types_of(schema: Any) -> set[str]:
    """JSON types that a schema takes, integers among numbers; empty where it does not say, and anything goes."""
    if not isinstance(schema, Mapping):
        return set()
    if constants := _listed(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
        return {type_of(constant) for constant in constants}
    branches = [types_of(one) for key in ("anyOf", "oneOf") for one in _listed(schema.get(key))]
    if branches:
        return set().union(*branches) if all(branches) else set()
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _listed(given)
    return {"number" if name == "integer" else str(name) for name in names}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def properties_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    properties = (found.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}
