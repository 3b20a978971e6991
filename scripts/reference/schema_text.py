"""JSON schemas as words: types, limits, rows of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scripts.reference.markdown import cell, code

Schema = Mapping[str, Any]
LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "length ≥",
    "maxLength": "length ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
}


def resolve(schema: Schema, shapes: Schema) -> Schema:
    """Follow a reference to a named shape, if it is one."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return dict(shapes[name]) if name in shapes else schema


def type_text(schema: Schema) -> str:
    """``integer ≥ 1``, ``[string]``, ``"a" | "b"``, the name of a shape; empty where nothing is said."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(type_text(one) or "any" for one in schema[key]))
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return _with_limits(f"[{type_text(schema.get('items', {})) or 'any'}]", schema)
    if schema.get("type") == "object" and isinstance(inner := schema.get("additionalProperties"), Mapping):
        return f"{{string: {type_text(inner) or 'any'}}}"
    return _with_limits(str(schema.get("type", "")), schema)


def _with_limits(text: str, schema: Schema) -> str:
    said = [f"{sign} {_number(schema[key])}" for key, sign in LIMITS.items() if key in schema]
    return ", ".join([text, *said]) if text else ""


def _number(value: float) -> str:
    """Whole numbers as such: pydantic writes an integer's limits as floats."""
    return str(int(value)) if value == int(value) else str(value)


def describe(name: str, field: Schema, needed: bool) -> str:
    """One row: name, type, default, description."""
    default = "*needed*" if needed else (code(json.dumps(field["default"])) if "default" in field else "")
    description = cell(str(field.get("description", "")))
    return f"| {code(name)} | {code(type_text(field) or 'any')} | {default} | {description} |"
