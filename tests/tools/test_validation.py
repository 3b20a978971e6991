from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.tools import check_arguments, truncate
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


def test_validation_huge_wrong_value_does_not_fill_the_message() -> None:
    message = check_arguments(SCHEMA, {"code": ["x"] * 10_000})
    assert message is not None
    assert len(message) < 300


def test_validation_additional_arguments_where_schema_says_so() -> None:
    assert check_arguments({"type": "object", "additionalProperties": True}, {"anything": 1}) is None
    with pytest.raises(ValueError, match="tool t: parameters are no JSON schema"):
        check_schema("t", {"type": "object", "required": "code"})


@pytest.mark.parametrize("max_chars", [1, 20, 60, 100, 999, 1000, 2000])
def test_validation_truncation_keeps_both_ends_and_the_limit(max_chars: int) -> None:
    text = "a" * 500 + "b" * 500
    cut = truncate(text, max_chars)
    assert len(cut) == min(max_chars, 1000)
    assert cut == truncate(cut, max_chars)
    if 60 < max_chars < 1000:
        assert "1000 characters in all" in cut
        assert (cut[0], cut[-1]) == ("a", "b")


def test_a_schema_is_judged_by_itself_however_many_there_are() -> None:
    for number in range(3000):
        kind = "integer" if number % 2 else "string"
        schema = {"type": "object", "properties": {"a": {"type": kind}}}
        for _ in range(2):
            assert (check_arguments(schema, {"a": number}) is None) == (kind == "integer")


KINDS = ["string", "boolean", "integer", "number", "null", "array", "object"]
VALUES = st.sampled_from(["x", "", 1, 2**70, 1.0, 0.5, True, None, [], [1], {}, {"a": 1}])
PROPERTY = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True)},
        optional={"description": st.just("Said."), "minLength": st.just(1), "enum": st.just(["x", 1])},
    ),
    st.sampled_from([{}, True, False]),
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), PROPERTY, max_size=3)},
    optional={
        "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        "additionalProperties": st.sampled_from([True, False, {"type": "string"}]),
        "minProperties": st.just(2),
    },
)


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, arguments=st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4))
def test_arguments_fit_as_the_validator_says(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Plain values are compared with the schema without the validator."""
    closed = {"additionalProperties": False, **schema}
    assert (check_arguments(schema, arguments) is None) == Draft202012Validator(closed).is_valid(arguments)
