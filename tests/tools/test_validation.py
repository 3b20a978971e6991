from __future__ import annotations

from typing import Any

import pytest

from penstock.tools import check_arguments
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
