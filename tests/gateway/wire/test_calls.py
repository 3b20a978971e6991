"""Calls of every syntax in streamed answers: what is shown early stands, and arguments have the types of the tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest
from tests.tools.parsers.families import CODE_FAMILY, FAMILIES, render

from penstock.gateway.wire.reader import AnswerReader, CallSyntax, Detokenizer
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest
from penstock.tools.parsers import ParserName, get_parser

HEAD = AnswerHead("chatcmpl-1", 1_700_000_000, "tiny", 5)
PROPERTIES = {"code": {"type": "string"}, "times": {"type": "integer"}}
TOOLS = ({"type": "function", "function": {"name": "python", "parameters": {"properties": PROPERTIES}}},)
FAMILY_OF = {one.parser: one for one in [*FAMILIES.values(), CODE_FAMILY]}
ARGUMENTS = {"code": "42"}


def read(detokenizer: Detokenizer, parser: str, ids: list[int], **fields: Any) -> tuple[str, Choice]:
    ask = CompletionRequest(api="chat", model="tiny", tools=TOOLS, **fields)
    reader = AnswerReader(ask, HEAD, 0, dataclasses.replace(detokenizer, syntax=CallSyntax(get_parser(parser))))
    shown = "".join(reader.feed([one], [-1.0]).text for one in ids)
    return shown, reader.finish("stop")


@pytest.mark.parametrize("parser", get_args(ParserName))
def test_calls_are_read_and_nothing_shown_is_taken_back(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], parser: str
) -> None:
    text = render(FAMILY_OF[parser], "Let me look.", [("python", ARGUMENTS)] * 2)
    shown, choice = read(detokenizer, parser, chat_for().encode(text + "<|im_end|>"))
    assert choice.content.startswith(shown)
    assert "Let me look." in choice.content
    assert [(call.name, call.arguments) for call in choice.calls] == [("python", ARGUMENTS)] * 2
    assert choice.finish_reason == "tool_calls"
    has_mark = get_parser(parser).opening != ""
    assert (shown == "Let me look.") is has_mark, "without a mark nothing can be shown before the answer has ended"


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm"])
def test_an_answer_with_one_call_at_a_time_ends_behind_the_first(
    detokenizer: Detokenizer, chat_for: Callable[..., Any], parser: str
) -> None:
    text = render(FAMILY_OF[parser], "", [("python", ARGUMENTS)] * 2)
    ids = chat_for().encode(text + "<|im_end|>")
    _, choice = read(detokenizer, parser, ids, parallel_tool_calls=False)
    assert [(call.name, call.arguments) for call in choice.calls] == [("python", ARGUMENTS)]
    assert len(choice.token_ids) < len(ids) * 0.6
