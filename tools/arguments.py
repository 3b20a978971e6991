"""The schema of a tool's arguments, read across references and combinations: its names and their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

_NAMES: Mapping[type, str] = {str: "string", dict: "object", list: "array"}
_REST = ("additionalProperties", "unevaluatedProperties")
"""Schemas of the arguments that no other keyword names."""


class ArgumentSchema:
    """Never raises, whatever the schema is: clients of the gateway send their own. Linear in the schema's size."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types: dict[int, set[str]] = {}
        self._parts = self._reach([root], self._applied)

    @property
    def names(self) -> list[str]:
        return list({str(name): None for part in self._parts for name in _mapping(part.get("properties"))})

    @property
    def required(self) -> list[str]:
        """Names that every call must have; those of one alternative among others are left out."""
        return [str(name) for part in self._reach([self._root], self._joined) for name in _listed(part.get("required"))]

    def takes(self, name: str) -> bool:
        """Schemas that say nothing about further arguments take those alone that they name or match."""
        if any(key in part for part in self._parts for key in _REST):
            return True
        patterns = (pattern for part in self._parts for pattern in _mapping(part.get("patternProperties")))
        return name in self.names or any(re.search(pattern, name) for pattern in patterns)

    def types(self, name: str) -> set[str]:
        """JSON types that the argument may have, integers among numbers; empty where nothing says, and anything goes.

        A name that stands in no `properties` has those of all patterns: a hostile pattern is not run.
        """
        named = [part["properties"][name] for part in self._parts if name in _mapping(part.get("properties"))]
        patterns = (schema for part in self._parts for schema in _mapping(part.get("patternProperties")).values())
        rest = (part[key] for part in self._parts for key in _REST if key in part)
        try:
            return set().union(*(self._types_of(schema) for schema in named or [*patterns, *rest]))
        except RecursionError:
            return set()

    def _types_of(self, schema: Any) -> set[str]:
        if not isinstance(schema, Mapping):
            return set()
        if id(schema) not in self._types:
            self._types[id(schema)] = set()  # a schema that leads back to itself adds nothing
            types = _common(self._constraints(schema))
            self._types[id(schema)] = types | {"null"} if types and schema.get("nullable") is True else types
        return self._types[id(schema)]

    def _constraints(self, schema: Mapping[str, Any]) -> Iterable[set[str]]:
        """Types by each keyword of `schema` that restricts them."""
        constants = _listed(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        yield {type_of(constant) for constant in constants}
        names = schema.get("type")
        names = [names] if isinstance(names, str) else _listed(names)
        yield {"number" if name == "integer" else str(name) for name in names}
        yield from map(self._types_of, self._joined(schema))
        for key in ("anyOf", "oneOf"):
            branches = [self._types_of(branch) for branch in _listed(schema.get(key))]
            yield set().union(*branches) if all(branches) else set()

    def _reach(
        self, schemas: list[Any], following: Callable[[Mapping[str, Any]], list[Any]]
    ) -> list[Mapping[str, Any]]:
        """`schemas` and those that `following` leads to, each once."""
        parts: dict[int, Mapping[str, Any]] = {}
        for schema in schemas:
            if isinstance(schema, Mapping) and id(schema) not in parts:
                parts[id(schema)] = schema
                schemas.extend(following(schema))
        return list(parts.values())

    def _joined(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that always hold along with `schema`."""
        return [*([self._target(schema["$ref"])] if "$ref" in schema else []), *_listed(schema.get("allOf"))]

    def _applied(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that hold for the same value as `schema`, always or as one alternative."""
        alternatives = [branch for key in ("anyOf", "oneOf") for branch in _listed(schema.get(key))]
        conditions = [schema[key] for key in ("then", "else") if key in schema]
        dependent = [one for key in ("dependentSchemas", "dependencies") for one in _mapping(schema.get(key)).values()]
        return [*self._joined(schema), *alternatives, *conditions, *dependent]

    def _target(self, reference: Any) -> Any:
        """The schema that a reference into the root leads to; None if there is none."""
        if not isinstance(reference, str):
            return None
        if not f"{reference}/".startswith("#/"):
            return self._anchors.get(reference)
        value = self._root
        for step in reference.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, Sequence) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                value = _mapping(value).get(key)
        return value

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """Schemas with a name, as `$anchor`, and in drafts 4 to 7 as `$id` or `id`, by the reference to it."""
        anchors: dict[str, Any] = {}
        waiting, seen = [self._root], set[int]()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, Mapping | list) or id(value) in seen:
                continue
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value
            if isinstance(value, Mapping):
                names = [value.get("$id"), value.get("id"), f"#{value.get('$anchor')}"]
                anchors |= {name: value for name in names if isinstance(name, str)}
        return anchors


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else _NAMES.get(type(value), "object")


def _common(sets: Iterable[set[str]]) -> set[str]:
    """Elements of all sets but the empty ones."""
    restricting = [one for one in sets if one]
    return set.intersection(*restricting) if restricting else set()


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
