"""Arguments of a call against the tool's schema; the model gets the error, with the argument's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jsonschema import Draft202012Validator, SchemaError, ValidationError

from penstock.common import nearest
from penstock.tools.arguments import ArgumentSchema

_VALIDATORS: dict[int, Draft202012Validator] = {}
"""By the id of a schema."""


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

    Arguments that the schema does not name are refused, unless it speaks of them (``additionalProperties``): tools are
    functions, and spelling this out in every schema would cost tokens in every prompt.
    """
    described = ArgumentSchema(schema)
    for name in arguments:
        if not described.takes(name):
            return f"unknown argument {name!r}{_nearest(name, described.names)}"
    errors = sorted(_validator(schema).iter_errors(arguments), key=lambda error: list(map(str, error.path)))
    return _describe(errors[0]) if errors else None


def _validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """One per schema object: making one costs several times the check itself."""
    known = _VALIDATORS.get(id(schema))
    # The validator holds its schema, so that no other object gets this id.
    if known is None or known.schema is not schema:
        if len(_VALIDATORS) >= 1024:
            _VALIDATORS.clear()
        known = _VALIDATORS[id(schema)] = Draft202012Validator(schema)
    return known


def _describe(error: ValidationError) -> str:
    if error.validator == "required" and not error.path:
        required, given = cast("list[str]", error.validator_value), cast("dict[str, Any]", error.instance)
        return f"argument {next(name for name in required if name not in given)!r} is missing"
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path).lstrip(".")
    message = error.message if len(error.message) <= 200 else f"{error.message[:100]} ... {error.message[-90:]}"
    return f"argument {where!r}: {message}" if where else message


def _nearest(name: str, known: Sequence[str]) -> str:
    if hint := nearest(name, known):
        return hint
    return f" (this tool takes: {', '.join(known)})" if known else " (this tool takes no arguments)"
