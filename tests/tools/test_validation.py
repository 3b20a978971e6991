from __future__ import annotations

from typing import Any

import pytest

from penstock.tools import check_arguments
from penstock.tools.arguments import ArgumentSchema
from penstock.tools.validation import check_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "mode": {"enum": ["a", "b"]},
    },
    "required": ["code"],
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": "1"}, None),
        ({"code": "1", "lines": [1], "mode": "a"}, None),
        ({}, "argument 'code' is missing"),
        ({"code": 1}, "argument 'code': 1 is not of type 'string'"),
        ({"code": "1", "lines": [1, "x"]}, "argument 'lines[1]': 'x' is not of type 'integer'"),
        ({"code": "1", "mode": "c"}, "argument 'mode': 'c' is not one of ['a', 'b']"),
        ({"cod": "1"}, "unknown argument 'cod'; did you mean 'code'?"),
        ({"code": "1", "zzzzzz": 1}, "unknown argument 'zzzzzz' (this tool takes: code, lines, mode)"),
    ],
)
def test_validation_message_names_the_argument(arguments: dict[str, Any], message: str | None) -> None:
    assert check_arguments(SCHEMA, arguments) == message


ID = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}
NAME = {"properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("schema", "valid", "wrong", "message"),
    [
        ({"anyOf": [ID, NAME]}, [{"id": 1}, {"name": "x"}], {"nam": "x"}, "'nam'; did you mean 'name'?"),
        ({"oneOf": [ID, NAME]}, [{"id": 1}], {"id": 1, "name": "x"}, "is valid under each of"),
        ({"allOf": [ID, {"$ref": "#/$defs/N"}]}, [{"id": 1, "name": "x"}], {"id": 1}, "argument 'name' is missing"),
        ({"$ref": "#/$defs/N"}, [{"name": "x"}], {"name": 1}, "argument 'name': 1 is not of type 'string'"),
        ({"$ref": "#/$defs/N"}, [{"name": "x"}], {"name": "x", "id": 1}, "unknown argument 'id' (this tool"),
        ({"patternProperties": {"^x-": {"type": "integer"}}}, [{"x-a": 1}], {"y-a": 1}, "unknown argument 'y-a'"),
        ({"allOf": [{**ID, "additionalProperties": True}]}, [{"id": 1, "more": 2}], {}, "argument 'id' is missing"),
        ({**ID, "if": {"properties": {"id": {"const": 0}}}, "then": NAME},
         [{"id": 1}, {"id": 0, "name": "x"}], {"id": 0}, "argument 'name' is missing"),
        ({**ID, "dependentSchemas": {"id": NAME}}, [{"id": 1, "name": "x"}], {"id": 1}, "argument 'name' is missing"),
        ({"allOf": [{"$ref": "#"}, ID]}, [], {"x": 1}, "unknown argument 'x' (this tool takes: id)"),
    ],
)  # fmt: skip
def test_validation_arguments_of_combined_schemas(
    schema: dict[str, Any], valid: list[dict[str, Any]], wrong: dict[str, Any], message: str
) -> None:
    schema = {"type": "object", "$defs": {"N": NAME}, **schema}
    assert [check_arguments(schema, arguments) for arguments in valid] == [None] * len(valid)
    assert message in (check_arguments(schema, wrong) or "")


def test_validation_huge_wrong_value_does_not_fill_the_message() -> None:
    message = check_arguments(SCHEMA, {"code": ["x"] * 10_000})
    assert message is not None
    assert len(message) < 300


def test_validation_additional_arguments_where_schema_says_so() -> None:
    assert check_arguments({"type": "object", "additionalProperties": True}, {"anything": 1}) is None
    with pytest.raises(ValueError, match="tool t: parameters are no JSON schema"):
        check_schema("t", {"type": "object", "required": "code"})


def nested(levels: int) -> Any:
    return {"type": "string"} if levels == 0 else {"anyOf": [nested(levels - 1)]}


CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {"$ref": 5, "allOf": 7, "anyOf": [3], "properties": [], "required": "x", "then": None},
        {"properties": {"x": {"$ref": "#/$defs/none/0", "type": 9, "enum": 4}}},
        {"properties": {"x": {"$ref": "#anchor"}}},
        {"properties": {"x": nested(900)}},
        {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": CHAIN},
        {"patternProperties": {"(a+)+$": True, "(": {}}},
    ],
    ids=["none", "wrong types", "wrong property", "anchor", "deep", "chain", "patterns"],
)
def test_validation_types_of_any_schema_of_a_client_are_read(schema: Any) -> None:
    assert ArgumentSchema(schema).types("x") == set()
    assert ArgumentSchema(schema).types("a" * 64 + "!") == set()
