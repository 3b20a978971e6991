"""An answer read as it comes: nothing shown is taken back, and chunks of any size read the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.wire import AnswerHead, AnswerReader, Choice, CompletionRequest, Detokenizer, read_answer

HEAD = AnswerHead("chatcmpl-1", 1_700_000_000, "tiny", 5)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'


def ask_for(**fields: Any) -> CompletionRequest:
    return CompletionRequest(
        **{"api": "chat", "model": "tiny", "messages": ({"role": "user", "content": "x"},), **fields}
    )


def read(
    detokenizer: Detokenizer, ids: list[int], sizes: list[int], reason: str = "stop", **fields: Any
) -> tuple[list[str], Choice]:
    reader = AnswerReader(ask_for(**fields), HEAD, 0, detokenizer)
    shown, start, left = [], 0, list(sizes)
    while start < len(ids):
        size = left.pop(0) if left else 1
        part = ids[start : start + size]
        shown.append(reader.feed(part, [-float(start + i) for i in range(len(part))]).text)
        start += size
    return shown, reader.finish(reason)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def encode(chat_for: Any) -> Any:
    return chat_for().encode


PIECES = st.lists(
    st.sampled_from(
        [
            CALL,
            BROKEN,
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "STOP",
            "STO",
            "stop",
            " ",
            "\n\n",
            "日",
            "👩",
            "a",
            "the",
        ]
    )
    | st.text(max_size=4),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=PIECES,
    sizes=st.lists(st.integers(1, 9), max_size=40),
    stop=st.sampled_from([(), ("STOP",), ("STOP", "TO"), ("\n\n",), ("日",), (" ", "</tool_call>")]),
    tools=st.sampled_from([(), TOOLS]),
    parallel=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    closed=st.booleans(),
)
def test_what_is_shown_is_the_beginning_of_what_it_is_in_the_end(
    detokenizer: Detokenizer,
    encode: Any,
    pieces: list[str],
    sizes: list[int],
    closed: bool,
    reason: str,
    parallel: bool,
    **fields: Any,
) -> None:
    fields |= {"parallel_tool_calls": parallel, "logprobs": True}
    ids = encode("".join(pieces) + ("<|im_end|>" if closed else ""))
    shown, choice = read(detokenizer, ids, sizes, reason, **fields)
    assert choice.content.startswith("".join(shown))
    assert choice.token_ids == tuple(ids[: len(choice.token_ids)])
    assert choice.logprobs == tuple(-float(i) for i in range(len(choice.token_ids)))
    assert len(choice.tokens) == len(choice.token_ids)
    assert not any(word in choice.text for word in fields["stop"])
    _, at_once = read(detokenizer, ids, [len(ids) or 1], reason, **fields)
    assert dataclasses.replace(at_once, logprobs=()) == dataclasses.replace(choice, logprobs=())


def test_a_stop_string_across_tokens_is_held_back_and_cut(detokenizer: Detokenizer, encode: Any) -> None:
    ids = encode("one STOP two<|im_end|>")
    shown, choice = read(detokenizer, ids, [], stop=("STOP",))
    assert ("".join(shown), choice.content, choice.finish_reason) == ("one ", "one ", "stop")
    kept = encode("one STOP")
    assert choice.token_ids == tuple(kept), "the ids that spell the stop string were sampled: they are kept"


def test_what_looked_like_a_stop_string_is_shown_once_it_is_none(detokenizer: Detokenizer, encode: Any) -> None:
    shown, choice = read(detokenizer, encode("a STO b"), [], stop=("STOP",))
    assert "".join(shown) == choice.content == "a STO b"


def test_an_answer_that_ends_on_half_a_stop_string_shows_it(detokenizer: Detokenizer, encode: Any) -> None:
    shown, choice = read(detokenizer, encode("a STO<|im_end|>"), [], stop=("STOP",))
    assert "".join(shown).startswith("a ")
    assert choice.content == "a STO"


def test_calls_are_held_back_and_read(detokenizer: Detokenizer, encode: Any) -> None:
    shown, choice = read(detokenizer, encode(f"Let me.\n{CALL}\n{CALL}<|im_end|>"), [], tools=TOOLS)
    assert "".join(shown) == choice.content == "Let me."
    assert [(one.name, one.arguments) for one in choice.calls] == [("add", {"a": 1})] * 2
    assert choice.finish_reason == "tool_calls"
    assert len({one.call_id for one in choice.calls}) == 2


def test_words_behind_a_call_are_kept(detokenizer: Detokenizer, encode: Any) -> None:
    shown, choice = read(detokenizer, encode(f"Before {CALL} after<|im_end|>"), [], tools=TOOLS)
    assert "".join(shown) == "Before"
    assert choice.content == "Before after"
    assert len(choice.calls) == 1


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (f"{CALL}\n{BROKEN}<|im_end|>", {"tools": TOOLS}, "stop"),
        (CALL, {"tools": TOOLS}, "length"),
        (f"{CALL}<|im_end|>", {"tools": TOOLS, "tool_choice": "none"}, "stop"),
        (f"{CALL}<|im_end|>", {}, "stop"),
    ],
    ids=["one is broken", "cut by length", "no calls wanted", "no tools"],
)
def test_calls_stay_text(detokenizer: Detokenizer, encode: Any, text: str, fields: dict[str, Any], reason: str) -> None:
    _, choice = read(detokenizer, encode(text), [], reason, **fields)
    assert (choice.content, choice.calls) == (text.removesuffix("<|im_end|>"), ())
    assert choice.finish_reason == reason


def test_one_call_at_a_time_ends_the_answer_behind_the_first(detokenizer: Detokenizer, encode: Any) -> None:
    reader = AnswerReader(ask_for(tools=TOOLS, parallel_tool_calls=False), HEAD, 0, detokenizer)
    ids = encode(f"{CALL}\n{CALL}<|im_end|>")
    reader.feed(ids, [0.0] * len(ids))
    assert reader.stopped
    choice = reader.finish("length")
    assert len(choice.calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert detokenizer.decode(choice.token_ids).rstrip("\n") == CALL


def test_read_again_from_a_record_it_is_the_same(detokenizer: Detokenizer, encode: Any) -> None:
    ids = encode(f"Hm. {CALL}<|im_end|>")
    ask = ask_for(tools=TOOLS, logprobs=True)
    reader = AnswerReader(ask, HEAD, 3, detokenizer)
    for one in ids:
        reader.feed([one], [-0.5])
    assert read_answer(ask, HEAD, 3, detokenizer, (ids, [-0.5] * len(ids), "stop")) == reader.finish("stop")


def test_thinking_stays_in_the_content(detokenizer: Detokenizer, encode: Any) -> None:
    text = "<think>\nhm\n</think>\n\nYes."
    _, choice = read(detokenizer, encode(text + "<|im_end|>"), [], tools=TOOLS)
    assert choice.content == text
