"""Whatever is written: nothing raises, nothing malformed can be dispatched, and time grows with the text's length."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.parsers.families import CODE_FAMILY, FAMILIES, render

from penstock.tools.parsers import ParsedTurn, ParserName, get_parser

NAMES = get_args(ParserName)
CALL = ("write_file", {"text": "a\nb", "count": 3, "nested": {"k": [None, "ü"]}})
CODE_CALL = ("python", {"code": "print(1)"})
VALID = {name: render(one, "Look.", [CALL, CALL]) for name, one in FAMILIES.items()}
VALID["code"] = render(CODE_FAMILY, "Look.", [CODE_CALL, CODE_CALL])
PARSER_OF = {**{name: one.parser for name, one in FAMILIES.items()}, "code": "code"}
MARKS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_start|>"),
    *("<|tool_call_end|>", "[f(", "[f(x=", "x='", ")]", "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "x:"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="x">'),
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜function_calls>", "functools["),
    *('[{"name": "f", "arguments": ', "<|action_start|>", "<|plugin|>", "<|action_end|>", "<|tool_call|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<|START_ACTION|>", '[{"tool_call_id": "0", ', "<|END_ACTION|>"),
    *("Action:\n```json\n[", "<|tools_prefix|>", "<function_call> ", "<tool_calls>", "</tool_calls>"),
    *("<TOOLCALL>", "<|open|>tools<|sep|>", "<|close|>call<|sep|>", '<|open|>call tool="f"<|sep|>'),
    *('<|open|>argument key="x"<|sep|>', "<|close|>tools<|sep|>", "<tool_calls:opensource>"),
    *("<tool_call:opensource>f<tool_sep:opensource>", '<function name="f"><param name="x">', " to=f<|message|>"),
    *("<atem:function_calls>", '<atem:invoke name="f">', "<|eom|>", "<|python_tag|>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|constrain|>", "<|call|>", "<|end|>", " to=f ", "```python\n", "\n```", "````", "<think>"),
    *("</think>", '{"name": "f", "parameters": ', '{"name": "f", "arguments": '),
]
JUNK = [
    *("\ud800", "\\ud800", "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000, '{"a":' * 3000, '{"a": 1, "a": 2}'),
    *("f", "{}", '{"x": 1}', '"', "\\", "}", "]", ",", ";", ":", " ", "\n", "\r", "\x00", "\u2028", "assistant"),
    *("json",),
]
pieces = st.sampled_from([*MARKS, *JUNK, *VALID.values()]) | st.text(max_size=8)


def checked(parser: str, text: str) -> ParsedTurn:
    turn = get_parser(parser).parse(text)
    assert [call.call_id for call in turn.calls] == [f"call_{i}" for i in range(len(turn.calls))]
    for call in turn.calls:
        if call.error is None:
            assert call.name
            assert isinstance(call.arguments, dict)
            json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
        else:
            assert not call.arguments
            call.error.encode()
    return turn


@pytest.mark.parametrize("parser", NAMES)
@settings(max_examples=100)
@given(text=st.lists(pieces, max_size=12).map("".join))
def test_parser_never_raises(parser: str, text: str) -> None:
    checked(parser, text)


def dispatched(turn: ParsedTurn) -> list[tuple[str, str]]:
    return [(call.name, repr(call.arguments)) for call in turn.calls if call.error is None]


@pytest.mark.parametrize("family", VALID)
def test_parser_reads_only_whole_calls_of_a_cut_turn(family: str) -> None:
    text, parser = VALID[family], PARSER_OF[family]
    whole = dispatched(checked(parser, text))
    assert len(whole) == 2
    for end in range(len(text)):
        found = dispatched(checked(parser, text[:end]))
        assert found == whole[: len(found)], text[:end]


@pytest.mark.parametrize("family", VALID)
@settings(max_examples=100)
@given(data=st.data())
def test_parser_survives_a_changed_turn(family: str, data: st.DataObject) -> None:
    text = VALID[family]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    checked(PARSER_OF[family], text[:start] + data.draw(pieces) + text[end:])


@pytest.mark.parametrize("family", [name for name in VALID if name not in ("hermes", "code")])
def test_parser_dispatches_nothing_after_a_malformed_call(family: str) -> None:
    """The first call is broken; behind the break stands a whole one, once as its own text and once on its own."""
    text = VALID[family]
    is_plain_text = bool(FAMILIES[family].marks)
    if is_plain_text:
        spot = text.index("\nb")
    else:
        spot = text.index('"text"') if '"text"' in text else text.index("text=") + len("text=")
    broken = checked(PARSER_OF[family], f"{text[:spot]}{text if is_plain_text else '{'}{text[spot:]}")
    assert dispatched(broken) == []
    assert len(broken.calls) == 1
    assert "malformed tool call" in (broken.calls[0].error or "")
    assert "what follows it was not read" in (broken.calls[0].error or "")


def hostile(size: int) -> Iterator[str]:
    for unit in [*MARKS, " ", "\n", "[", '"', "\\", "<", "{", '{"name": "f\\', "f[ARGS]", "<tool_call>{", "```\n"]:
        yield unit * (size // len(unit))
    for head in [
        *MARKS,
        "<tool_call><function=",
        "<tool_call>f<arg_key>",
        "[TOOL_CALLS]f[ARGS]",
        "<|channel|> to=f <|message|>",
    ]:
        for tail in (" ", "a", "[", '"'):
            yield head + tail * (size - len(head))
    for text in VALID.values():
        yield text[:-2] * (size // len(text))
        yield text * (size // len(text))


@pytest.mark.parametrize("parser", NAMES)
def test_parser_time_is_linear_in_the_text(parser: str) -> None:
    """100 kB each. Quadratic time would be minutes; the bound leaves room for slow machines."""
    for text in hostile(100_000):
        began = time.process_time()
        checked(parser, text)
        assert time.process_time() - began < 5, text[:80]
