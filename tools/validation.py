"""Arguments of a call against the tool's schema; the model gets the error, with the argument's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jsonschema import Draft202012Validator, SchemaError, ValidationError

from penstock.common import nearest

_CHECKERS: dict[int, _Checker] = {}
"""id of a schema → what checks it"""
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "null": (type(None),)},
    **{"array": (list,), "object": (dict,)},
}
_OF_PLAIN_VALUES = frozenset({"type", "description", "title", "default", "examples"})
_OF_PLAIN_SCHEMAS = frozenset({"type", "properties", "required", "description", "title", "additionalProperties"})


def check_schema(tool: str, schema: Mapping[str, Any]) -> None:
    """Raises `ValueError` naming the tool where `schema` is no JSON schema of an object."""
    if schema.get("type") != "object":
        raise ValueError(f"tool {tool}: parameters must be a JSON schema of type object")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"tool {tool}: parameters are no JSON schema: {error.message}") from error


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """None where they fit, else one line for the model.

    Arguments that the schema does not name are refused, unless it says ``additionalProperties``: tools are functions,
    and spelling this out in every schema would cost tokens in every prompt.
    """
    known = schema.get("properties", {})
    if "additionalProperties" not in schema:
        for name in arguments:
            if name not in known:
                return f"unknown argument {name!r}{_nearest(name, known)}"
    checker = _checker(schema)
    if checker.surely_fit(arguments):
        return None
    errors = sorted(checker.validator.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
    return _describe(errors[0]) if errors else None


@dataclass(frozen=True, slots=True)
class _Checker:
    """Of one schema object."""

    validator: Draft202012Validator
    types: Mapping[str, frozenset[type]]
    """Argument → types of which every value fits; only arguments of which the schema says no more than that."""
    required: frozenset[str]
    is_plain: bool
    """The schema says nothing of the arguments together but which are required."""

    def surely_fit(self, arguments: Mapping[str, Any]) -> bool:
        """False: the validator decides. It costs several times as much, and most tools ask for a few plain values."""
        if not self.is_plain or not self.required <= arguments.keys():
            return False
        return all(type(value) in self.types.get(name, ()) for name, value in arguments.items())


def _checker(schema: Mapping[str, Any]) -> _Checker:
    """One per schema object: making one costs several times the check itself."""
    known = _CHECKERS.get(id(schema))
    # The validator holds its schema, so that no other object gets this id.
    if known is not None and known.validator.schema is schema:
        return known
    if len(_CHECKERS) >= 1024:
        _CHECKERS.clear()
    types = {name: _types_of(one) for name, one in schema.get("properties", {}).items()}
    made = _CHECKERS[id(schema)] = _Checker(
        Draft202012Validator(schema),
        {name: found for name, found in types.items() if found},
        frozenset(schema.get("required", ())),
        schema.keys() <= _OF_PLAIN_SCHEMAS,
    )
    return made


def _types_of(schema: Any) -> frozenset[type]:
    """Types of which every value fits; none where the schema asks for more."""
    if not isinstance(schema, Mapping) or not schema.keys() <= _OF_PLAIN_VALUES:
        return frozenset()
    named = schema.get("type")
    return frozenset(kind for name in ([named] if isinstance(named, str) else named or ()) for kind in _TYPES[name])


def _describe(error: ValidationError) -> str:
    if error.validator == "required" and not error.path:
        required, given = cast("list[str]", error.validator_value), cast("dict[str, Any]", error.instance)
        return f"argument {next(name for name in required if name not in given)!r} is missing"
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path).lstrip(".")
    message = error.message if len(error.message) <= 200 else f"{error.message[:100]} ... {error.message[-90:]}"
    return f"argument {where!r}: {message}" if where else message


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    if hint := nearest(name, known):
        return hint
    return f" (this tool takes: {', '.join(known)})" if known else " (this tool takes no arguments)"
