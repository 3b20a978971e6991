"""When a list of Python calls is an answer's call and when it is prose: as vLLM's own reading of it has it."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.tools.parsers import get_parser

names = st.sampled_from(["f", "search_web", "ns.look", "Get2"])
keys = st.sampled_from(["x", "query", "top_k"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(keys, literals, max_size=3)), min_size=1, max_size=3)
words = st.text(st.sampled_from("abc ,.:()]='\"\n1`*"), max_size=20)
"""No `[`, so that none begins a list of its own."""
pieces = st.sampled_from(
    ["[f(x=1)]", "[f(", "x=", "[", "]", ")", "(", ", ", "f()", "'", '"', "1", "\n", " ", "</think>", "<|eot|>", "word"]
)


def written(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in made) + "]"


def of_vllm(text: str) -> list[tuple[str, dict[str, Any]]]:
    """vLLM's `pythonic`: an answer whose whole text Python reads as one list of calls with literals; else none."""
    try:
        body = ast.parse(text).body
        lone = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
        if not isinstance(lone, ast.List) or not all(isinstance(call, ast.Call) for call in lone.elts):
            return []
        return [(ast.unparse(one.func), {k.arg: ast.literal_eval(k.value) for k in one.keywords}) for one in lone.elts]
    except (SyntaxError, ValueError):
        return []


def dispatched(text: str) -> list[tuple[str, Any]]:
    turn = get_parser("pythonic").parse(text)
    return [(call.name, call.arguments) for call in turn.calls if call.error is None]


@settings(max_examples=30)
@given(made=calls, thought=words)
def test_pythonic_reads_a_whole_answer_as_vllm_does(made: list[tuple[str, dict[str, Any]]], thought: str) -> None:
    text = written(made)
    assert repr(dispatched(text)) == repr(of_vllm(text)) == repr(made)
    assert repr(dispatched(f"<think>{thought}</think>\n{text}<|eot|>\n")) == repr(made)


@settings(max_examples=60)
@given(made=calls, before=words, behind=words)
def test_pythonic_reads_no_calls_in_prose(made: list[tuple[str, dict[str, Any]]], before: str, behind: str) -> None:
    assume(before.strip() or behind.strip())
    text = f"{before}{written(made)}{behind}"
    turn = get_parser("pythonic").parse(text)
    assert (turn.calls, turn.content) == ((), text.strip())
    assert of_vllm(text.strip()) == []


@settings(max_examples=60)
@given(parts=st.lists(pieces, max_size=10))
def test_pythonic_calls_are_all_of_an_answer(parts: list[str]) -> None:
    text = "".join(parts)
    if dispatched(text):
        answer = "".join(text.replace("<|eot|>", "").split())
        assert answer.endswith(")]")
        starts = (answer, answer.partition("</think>")[2], answer.rpartition("</think>")[2])
        assert any(one.startswith("[") for one in starts)


@pytest.mark.parametrize(
    "text",
    [
        "Use [search_web(query='x')] to look for x.",
        "One writes:\n[search_web(query='x')]\nand gets a list.",
        "```python\n[f(x=1)]\n```",
        "1. [f(x=1)]",
        "[f(x=1)]\n[f(x=2)]",
    ],
)
def test_pythonic_leaves_examples_in_an_answer_alone(text: str) -> None:
    turn = get_parser("pythonic").parse(text)
    assert (turn.calls, turn.content) == ((), text)
