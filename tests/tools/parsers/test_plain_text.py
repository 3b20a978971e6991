from __future__ import annotations

from typing import Any

import pytest

from penstock.tools.parsers import typed

OPTIONAL_MODEL = {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        (" 42\n", {"type": "integer"}, 42),
        ("4.0", {"type": "integer"}, 4.0),
        ("many", {"type": "integer"}, "many"),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ('{"x": 1}', OPTIONAL_MODEL, {"x": 1}),
        ('{"x": 1}', {"type": "object"}, {"x": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": 2}, 2),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ('"quoted"', None, '"quoted"'),
        ("5", {"type": 7, "anyOf": 3}, 5),
    ],
)
def test_a_value_is_read_as_its_schema_has_it(text: str, schema: Any, value: object) -> None:
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))
