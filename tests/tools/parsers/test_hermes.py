from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tools.parsers import ToolCall, get_parser

PARSER = get_parser("hermes")
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "python", "arguments": {',
        "}",
        '"',
        "\\ud800",
        " ",
        "\n",
        "[" * 2000,
    ]
)


def test_text_without_calls() -> None:
    assert PARSER.parse("  The answer is 42.\n") == PARSER.parse("The answer is 42.")
    assert PARSER.parse("").calls == ()


def test_several_calls_with_text_around_them() -> None:
    turn = PARSER.parse(f"first {CALL} then\n{CALL.replace('print(1)', 'x</tool_call>y')}")
    assert turn.content == "first  then"
    assert turn.calls == (
        ToolCall("python", {"code": "print(1)"}, "call_0"),
        ToolCall("python", {"code": "x</tool_call>y"}, "call_1"),
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{name: 1}", "no valid JSON"),
        ('{"name": "python"}', '"arguments" must be a JSON object'),
        ('{"name": "python", "arguments": "{}"}', '"arguments" must be a JSON object'),
        ('{"name": 3, "arguments": {}}', '"name" must be a text'),
        ('{"name": "", "arguments": {}}', '"name" must be a text'),
        ('["python"]', "it must be a JSON object"),
        ('{"name": "python", "arguments": {}, "id": 1}', "'id' has no meaning here"),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', "no Unicode text"),
        ('{"name": "python", "arguments": {"x": NaN}}', "NaN is no JSON"),
        ('{"name": "python", "arguments": {"x": 1e999}}', "a number that is too large"),
        ('{"name": "python", "arguments": {"x": ' + "9" * 5000 + "}}", "no valid JSON"),
        ('{"name": "python", "arguments": {"x": ' + "[" * 100_000, "no valid JSON"),
        ('{"name": "python", "arguments": {}} and more', "text follows the JSON"),
        ("", "no valid JSON"),
    ],
)
def test_malformed_calls_carry_an_error_and_do_not_hide_the_next(body: str, message: str) -> None:
    turn = PARSER.parse(f"a <tool_call>{body}</tool_call> b {CALL}")
    assert turn.content == "a  b"
    assert [call.call_id for call in turn.calls] == ["call_0", "call_1"]
    assert message in (turn.calls[0].error or "")
    assert not turn.calls[0].arguments
    assert turn.calls[1] == ToolCall("python", {"code": "print(1)"}, "call_1")


def test_a_call_that_was_cut_off_is_an_error() -> None:
    assert "</tool_call> is missing" in (PARSER.parse(CALL.removesuffix("</tool_call>")).calls[0].error or "")
    assert "no valid JSON" in (PARSER.parse(CALL[:40]).calls[0].error or "")
    two = PARSER.parse(f"<tool_call>{{ {CALL}")
    assert [call.error is None for call in two.calls] == [False, True]


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=4), st.text(), st.booleans())
def test_what_was_written_is_what_is_read(
    name: str, arguments: dict[str, object], before: str, ascii_only: bool
) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    turn = PARSER.parse(f"{before}<tool_call>{body}</tool_call>")
    if "<tool_call>" not in before:
        assert turn.content == before.strip()
        assert turn.calls == (ToolCall(name, arguments, "call_0"),)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces | st.text(max_size=8), max_size=12).map("".join))
def test_nothing_makes_it_raise_and_what_it_accepts_is_well_formed(text: str) -> None:
    for call in PARSER.parse(text).calls:
        assert call.error or (call.name and isinstance(call.arguments, dict))
        assert not (call.error and call.arguments)


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        get_parser("herms")
