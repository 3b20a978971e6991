"""Calls that a model tries out in thought are content: an answer begins behind the end of its thought."""

from __future__ import annotations

import pytest
from tests.tools.parsers.families import FAMILIES, render

from penstock.tools.parsers import get_parser
from penstock.tools.parsers.turn import MarkedParser

ENDS = {
    "mistral": "[/THINK]",
    "seed_oss": "</seed:think>",
    "cohere": "<|END_THINKING|>",
    "hy_v3": "</think:opensource>",
    "kimi_k3": "<|close|>think<|sep|>",
    "gemma4": "<channel|>",
}
"""Of a thought; `</think>` for the others."""
MARKED = {name: one for name, one in FAMILIES.items() if isinstance(get_parser(one.parser), MarkedParser)}


def codes(parser: str, text: str) -> list[str]:
    return [
        call.arguments["code"] if call.error is None else call.error for call in get_parser(parser).parse(text).calls
    ]


@pytest.mark.parametrize("family", MARKED)
def test_parser_reads_no_call_of_a_closed_thought(family: str) -> None:
    one = MARKED[family]
    end = ENDS.get(one.parser, "</think>")
    tried, meant = (render(one, "", [("python", {"code": code})]) for code in ("tried", "meant"))
    thinks = one.parser != "apertus"  # its models call tools in the middle of a thought
    assert codes(one.parser, f"try {tried}\nor {tried}\n{end}\n{meant}") == ["tried"] * 2 * (not thinks) + ["meant"]
    assert codes(one.parser, f"try {tried}") == ["tried"], "without an end it may be the answer itself"
    if thinks:
        assert codes(one.parser, f"try {tried[:-1]} or {one.call[:9]}\n{end}\n{meant}")[-1:] == ["meant"]
        content = get_parser(one.parser).parse(f"try {tried}\n{end}\nI shall look.").content
        assert content == f"try {tried}\n{end}\nI shall look."


@pytest.mark.parametrize("family", MARKED)
def test_parser_reads_an_argument_that_spells_the_end_of_a_thought(family: str) -> None:
    one = MARKED[family]
    end = ENDS.get(one.parser, "</think>")
    if any(mark in end for mark in one.marks):
        pytest.skip("the syntax has no way to write this mark in an argument")
    first, spelled = (render(one, "", [("python", {"code": code})]) for code in ("tried", f"print('{end}')"))
    assert codes(one.parser, spelled) == [f"print('{end}')"]
    assert codes(one.parser, f"<think>{first}{end}\n{spelled}")[-1:] == [f"print('{end}')"]
