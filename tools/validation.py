"""Arguments of a call against the tool's schema; the model gets the error, with the argument's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator, SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from penstock.common import nearest
from penstock.tools.arguments import ArgumentSchema


def _or_null(dialect: Any, keyword: str) -> Any:
    def check(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterable[ValidationError]:
        if not (instance is None and schema.get("nullable") is True):
            yield from dialect.VALIDATORS[keyword](validator, value, instance, schema)

    return check


DIALECTS = tuple(
    extend(dialect, {key: _or_null(dialect, key) for key in ("type", "enum", "$ref", "allOf", "anyOf", "oneOf")})
    for dialect in (Draft202012Validator, Draft7Validator, Draft4Validator)
)
"""Tried in order for a schema without `$schema`; OpenAPI 3.0, which has `nullable` too, and older generators write
the later ones."""
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_VALIDATORS: dict[int, Any] = {}
"""Validators by the id of a schema."""


def check_schema(tool: str, schema: Mapping[str, Any], field: str = "parameters are") -> None:
    """Raises `ValueError` naming the tool and the field if `schema` is not a JSON schema of an object, or refers to
    what is not there, which would end the episode that calls the tool."""
    if schema.get("type") != "object":
        raise ValueError(f"tool {tool}: parameters must be a JSON schema of type object")
    try:
        _check_parts(schema, _dialect_of(schema))
    except SchemaError as error:
        place = f" ({error.json_path})" if error.path else ""
        known = f"; types are {', '.join(TYPES)}" if [*error.path][-1:] == ["type"] else ""
        raise ValueError(f"tool {tool}: {field} no JSON schema: {error.message}{place}{known}") from error


def _dialect_of(schema: Mapping[str, Any]) -> Any:
    """The validator class of `$schema`; without a known one the first of `DIALECTS` in which `schema` is valid."""
    if named := validator_for(schema, cast("Any", None)):
        return named
    return next((dialect for dialect in DIALECTS if _is_valid(dialect, schema)), Draft202012Validator)


def _is_valid(dialect: Any, schema: Mapping[str, Any]) -> bool:
    try:
        dialect.check_schema(schema)
    except SchemaError:
        return False
    return True


def _check_parts(schema: Mapping[str, Any], dialect: Any) -> None:
    """`schema` and all that its references lead to. Raises `SchemaError`."""
    specification = specification_with(dialect.META_SCHEMA["$schema"])
    dialect.check_schema(schema)
    root = specification.create_resource(schema)
    parts = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    for part, resolver in parts:
        if id(part.contents) in seen or not isinstance(part.contents, Mapping):
            continue
        seen.add(id(part.contents))
        for pattern in part.contents.get("patternProperties", ()):  # the meta-schema of draft 4 does not look at them
            try:
                re.compile(pattern)
            except re.error as error:
                raise SchemaError(f"{pattern!r} is not a 'regex'") from error
        parts += [(inner, resolver.in_subresource(inner)) for inner in part.subresources()]
        for reference in (part.contents.get(keyword) for keyword in ("$ref", "$dynamicRef")):
            if not isinstance(reference, str):
                continue
            try:
                target = resolver.lookup(reference)
            except Unresolvable as error:
                raise SchemaError(f"the reference {reference!r} leads nowhere") from error
            dialect.check_schema(target.contents)
            parts.append((specification.create_resource(target.contents), target.resolver))


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """None if they fit, else one line for the model.

    Arguments that the schema does not name are refused, unless it speaks of them (``additionalProperties``): tools are
    functions, and spelling this out in every schema would cost tokens in every prompt.
    """
    described = ArgumentSchema(schema)
    for name in arguments:
        if not described.takes(name):
            return f"unknown argument {name!r}{_nearest(name, described.names)}"
    # One per schema object: making one costs several times the check itself. References never go to the network.
    known = _VALIDATORS.get(id(schema))
    # The validator holds its schema, so that no other object gets this id.
    if known is None or known.schema is not schema:
        if len(_VALIDATORS) >= 1024:
            _VALIDATORS.clear()
        known = _VALIDATORS[id(schema)] = _dialect_of(schema)(schema, registry=REGISTRY)
    try:
        errors = sorted(known.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
    except RecursionError:
        return "the tool's schema refers to itself without end"
    return _describe(errors[0]) if errors else None


def _describe(error: ValidationError) -> str:
    if error.validator == "required" and not error.path:
        required, arguments = cast("list[str]", error.validator_value), cast("dict[str, Any]", error.instance)
        return f"argument {next(name for name in required if name not in arguments)!r} is missing"
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path).lstrip(".")
    message = error.message if len(error.message) <= 200 else f"{error.message[:100]} ... {error.message[-90:]}"
    return f"argument {where!r}: {message}" if where else message


def _nearest(name: str, known: Sequence[str]) -> str:
    if hint := nearest(name, known):
        return hint
    return f" (this tool takes: {', '.join(known)})" if known else " (this tool takes no arguments)"
