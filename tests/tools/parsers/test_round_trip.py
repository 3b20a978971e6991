"""What a family's template writes, its parser reads: the same names and arguments, to the last character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tools.parsers.families import (
    CODE_FAMILY,
    FAMILIES,
    QUOTED,
    UNQUOTED,
    Family,
    one_line,
    render,
    unescaped,
)

from penstock.tools.parsers import ToolCall, get_parser

HARD_TEXTS = [
    "",
    " two  spaces ",
    "\nlines\n\nand\ttabs\r\n",
    "\"quotes\" 'and' \\back\\slashes\\n",
    "naïve – 数学 👩‍🚀 \u2028",
    "```\nfence\n```",
    "; {[}] </think> <b>&amp;</b>",
    "true",
    "42",
    "null",
    '{"a": 1}',
]
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "path": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "nested": {"type": "object"},
    "mode": {"enum": ["fast", "slow"]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("write_file", "ns.search-web")
]
texts = st.sampled_from(HARD_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "path": texts.filter(lambda text: text.strip() not in ("null", "None")) | st.none(),
        "count": st.integers(),
        "ratio": finite,
        "flag": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "nested": st.dictionaries(texts, json_values, max_size=3),
        "mode": st.sampled_from(["fast", "slow"]),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["write_file", "ns.search-web"]), arguments), min_size=1, max_size=3)


def parsed(family: Family, text: str) -> tuple[str, list[tuple[str, Any]]]:
    turn = get_parser(family.parser).parse(text, TOOLS)
    assert [call.error for call in turn.calls] == [None] * len(turn.calls)
    assert [call.call_id for call in turn.calls] == [f"call_{i}" for i in range(len(turn.calls))]
    return turn.content, [(call.name, call.arguments) for call in turn.calls]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(calls=calls)
def test_parser_reads_what_its_template_wrote(family: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    one = FAMILIES[family]
    calls = [(name, one.fit(arguments)) for name, arguments in calls]
    written = repr(calls)
    if any(mark in written for mark in one.marks):
        return
    before, behind = one.wrapped
    content, found = parsed(one, render(one, "I shall look.", calls))
    assert found == calls
    assert repr(found) == written, "the same types too: 1 is neither 1.0 nor True"
    assert content.rstrip("; ") == f"{before}I shall look.{behind}"


@pytest.mark.parametrize("family", FAMILIES)
def test_parser_reads_every_hard_text(family: str) -> None:
    one = FAMILIES[family]
    for text in HARD_TEXTS:
        rendered = [("write_file", one.fit({"text": text, "nested": {text: [text]}}))]
        assert parsed(one, render(one, "", rendered))[1] == rendered


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm"])
def test_parser_guesses_types_without_a_schema(parser: str) -> None:
    one = FAMILIES[parser]
    given_arguments = {"a": 1, "b": True, "c": None, "d": [1, "x"], "e": {"k": 0.5}, "f": "text", "g": "007", "h": ""}
    text = render(one, "", [("any", given_arguments)])
    assert get_parser(parser).parse(text).calls == (ToolCall("any", given_arguments, "call_0"),)
    typed_text = render(one, "", [("write_file", {"text": "42", "count": "many"})])
    assert get_parser(parser).parse(typed_text, TOOLS).calls[0].arguments == {"text": "42", "count": "many"}
    assert get_parser(parser).parse(typed_text).calls[0].arguments == {"text": 42, "count": "many"}


TYPED_BY_SCHEMA = ("qwen3_coder", "glm", "minimax_m2", "seed_oss", "hy_v3", "minicpm5", "muse_glimmer")
ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
COUNT = {"type": ["integer", "null"]}
SCHEMAS = {
    "ref": {"properties": {"zip": {"$ref": "#/$defs/Zip"}, "count": {"$ref": "#/definitions/Count"}}},
    "allOf": {
        "properties": {"zip": {"allOf": [{"maxLength": 5}, {"$ref": "#/$defs/Zip"}]}, "count": {"allOf": [COUNT]}}
    },
    "anyOf": {"properties": {"zip": {"anyOf": [{"$ref": "#/$defs/Zip"}]}, "count": {"oneOf": [COUNT]}}},
    "root ref": {"$ref": "#/$defs/Address"},
    "root allOf": {"allOf": [{"$ref": "#/$defs/Address"}, {"properties": {"zip": {"minLength": 5}}}]},
    "root anyOf": {"anyOf": [{"properties": {"zip": ZIP}}, {"properties": {"count": COUNT}}]},
    "then": {"if": {}, "then": {"properties": {"zip": ZIP, "count": COUNT}}},
    "patterns": {"patternProperties": {"^z": ZIP}, "properties": {"count": COUNT}},
    "additional": {"additionalProperties": ZIP, "properties": {"count": COUNT}},
}
DEFINITIONS = {
    "$defs": {
        "Zip": {"allOf": [ZIP, {"$ref": "#/$defs/Zip"}]},
        "Address": {"properties": {"zip": ZIP, "count": COUNT}},
    },
    "definitions": {"Count": COUNT},
}


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("family", [*map(FAMILIES.get, TYPED_BY_SCHEMA), UNQUOTED], ids=lambda one: one.parser)
def test_parser_finds_types_behind_references_and_combinations(family: Family, schema: str) -> None:
    function = {"name": "find", "parameters": {"type": "object", **DEFINITIONS, **SCHEMAS[schema]}}
    written = {"zip": "10115", "count": 5}
    calls = get_parser(family.parser).parse(render(family, "", [("find", written)]), [{"function": function}]).calls
    assert [call.arguments for call in calls] == [written]


@pytest.mark.parametrize(("family", "fit"), [(QUOTED, unescaped), (UNQUOTED, one_line)])
@settings(max_examples=30)
@example(calls=[("write_file", {"nested": {"\\": ["\\"]}})])
@given(calls=calls)
def test_pythonic_reads_texts_in_any_quotes(family: Family, fit: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """As Llama 4 and ToolACE write them: around every value, around none. The schema says what is text."""
    calls = [(name, {k: v for k, v in fit(one).items() if v is not None}) for name, one in calls]
    found = parsed(family, render(family, "", calls))[1]
    assert (found, repr(found)) == (calls, repr(calls))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["python", "shell"]), min_size=1, max_size=3), texts)
def test_parser_reads_code_as_it_was_written(names: list[str], code: str) -> None:
    code = f"x = 1\n{code}".replace("```", "'''").replace("</think>", "")
    keys = {"python": "code", "shell": "command"}
    rendered = [(name, {keys[name]: code}) for name in names]
    content, found = parsed(CODE_FAMILY, render(CODE_FAMILY, "I shall look.", rendered))
    assert (content, found) == ("I shall look.", rendered)


@settings(max_examples=60)
@given(st.text(min_size=1), st.dictionaries(texts, json_values, max_size=4), st.text(), st.booleans())
def test_hermes_reads_any_name_and_json(name: str, arguments: dict[str, object], before: str, ascii_only: bool) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    turn = get_parser("hermes").parse(f"{before}<tool_call>{body}</tool_call>")
    if "<tool_call>" not in before:
        assert (turn.content, turn.calls) == (before.strip(), (ToolCall(name, arguments, "call_0"),))
