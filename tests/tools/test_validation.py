from __future__ import annotations

import re
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
        ({"$ref": "#named", "definitions": {"n": {**NAME, "$anchor": "named"}}},
         [{"name": "x"}], {"name": "x", "id": 1}, "unknown argument 'id' (this tool takes: name)"),
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


def test_validation_schema_that_is_its_own_reference_is_no_end_of_an_episode() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}}
    assert "refers to itself" in (check_arguments(schema, {"x": 1}) or "")


def test_validation_huge_wrong_value_does_not_fill_the_message() -> None:
    message = check_arguments(SCHEMA, {"code": ["x"] * 10_000})
    assert message is not None
    assert len(message) < 300


def test_validation_additional_arguments_where_schema_says_so() -> None:
    assert check_arguments({"type": "object", "additionalProperties": True}, {"anything": 1}) is None
    with pytest.raises(ValueError, match="tool t: parameters are no JSON schema"):
        check_schema("t", {"type": "object", "required": "code"})


TUPLE = [{"type": "string"}, {"type": "integer"}]
BOUND = {"type": "integer", "minimum": 0, "exclusiveMinimum": True}


@pytest.mark.parametrize(
    ("dialect", "argument", "valid", "wrong"),
    [
        (None, {"prefixItems": TUPLE}, ["x", 1], ["x", "y"]),
        ("https://json-schema.org/draft/2020-12/schema", {"prefixItems": TUPLE}, ["x", 1], ["x", "y"]),
        ("http://json-schema.org/draft-07/schema#", {"items": TUPLE}, ["x", 1], ["x", "y"]),
        (None, {"items": TUPLE}, ["x", 1], ["x", "y"]),
        ("https://json-schema.org/draft-07/schema#", {"items": TUPLE}, ["x", 1], ["x", "y"]),
        ("http://json-schema.org/draft-04/schema#", BOUND, 1, 0),
        (None, BOUND, 1, 0),
        (None, {"type": "string", "nullable": True}, None, 1),
        (None, {"type": "string", "enum": ["a"], "nullable": True}, None, "b"),
        *((None, {"nullable": True, key: [{"$ref": "#/definitions/N"}]}, None, "x") for key in ("allOf", "oneOf")),
        (None, {"nullable": True, "$ref": "#/definitions/N"}, None, "x"),
        ("http://json-schema.org/draft-07/schema#", {"$ref": "#/definitions/N"}, 1, "x"),
        (None, {"$ref": "#number"}, 1, "x"),
        (None, {"$ref": "#/components/schemas/M"}, 1, "x"),
    ],
)
def test_validation_follows_the_dialect(dialect: str | None, argument: dict[str, Any], valid: Any, wrong: Any) -> None:
    schema = {
        **({"$schema": dialect} if dialect else {}),
        **{"type": "object", "properties": {"x": argument}},
        "definitions": {"N": {"$anchor": "number", "type": "integer"}},
        "components": {"schemas": {"M": {"$ref": "#/definitions/N"}}},
    }
    check_schema("t", schema)
    assert check_arguments(schema, {"x": valid}) is None
    assert (check_arguments(schema, {"x": wrong}) or "").startswith("argument 'x")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/Lost"}}}, "no JSON schema: the reference '#/$defs/Lost' leads nowhere"),
        ({"properties": {"x": {"items": {"anyOf": [{"$ref": "#lost"}]}}}}, "reference '#lost' leads nowhere"),
        ({"properties": {"x": {"$ref": "http://127.0.0.1:9/x.json"}}}, "'http://127.0.0.1:9/x.json' leads nowhere"),
        ({"properties": {"x": {"$ref": "#/a/b"}}, "a": {"b": {"$ref": "#/$defs/Lost"}}}, "'#/$defs/Lost'"),
        (
            {"properties": {"x": {"$ref": "#/a/b"}}, "a": {"b": {"pattern": "("}}},
            "no JSON schema: '(' is not a 'regex'",
        ),
        ({"properties": {"x": {"pattern": "^\\p{L}+$"}}}, "no JSON schema: '^\\\\p{L}+$' is not a 'regex'"),
        ({"patternProperties": {"(?<a>b)": {}}}, "no JSON schema: '(?<a>b)' is not a 'regex'"),
        ({"properties": {"x": {"type": "any"}}}, "schemas ($.properties.x.type); types are string, integer,"),
    ],
)
def test_validation_refuses_at_start_what_would_end_episodes(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"tool t: parameters .*{re.escape(message)}"):
        check_schema("t", {"type": "object", **schema})


def test_validation_null_that_openapi_allows_is_a_type() -> None:
    properties = {"x": {"type": "integer", "nullable": True}, "y": {"nullable": True}}
    described = ArgumentSchema({"properties": properties})
    assert [described.types(name) for name in properties] == [{"number", "null"}, set()]


@pytest.mark.parametrize("name", [{"$anchor": "zip"}, {"$id": "#zip"}, {"id": "#zip"}])
def test_validation_types_behind_a_named_schema_are_read(name: dict[str, str]) -> None:
    schema = {"properties": {"x": {"$ref": "#zip"}}, "definitions": {"Z": {**name, "type": "string"}}}
    assert ArgumentSchema(schema).types("x") == {"string"}


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
