"""An answer read as it comes: nothing shown is taken back, and chunks of any size read the same.

Ids to text in pieces: the pieces joined are the text of all ids, whatever the ids and the pieces are.

Single tokens: their bytes joined are the answer's bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from penstock.agent_loops import ChatTokens
from penstock.gateway.wire.reader import (
    UNSETTLED,
    WINDOW_IDS,
    AnswerReader,
    Decode,
    Detokenizer,
    TextStream,
    byte_of_character,
    read_answer,
    token_bytes_of,
    token_of,
)
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest

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


WORDS = [
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
PIECES = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=8)


@settings(max_examples=150)
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


STOP = {"stop": ("STOP",)}
THOUGHT = "<think>\nhm\n</think>\n\nYes."


@pytest.mark.parametrize(
    ("text", "fields", "shown", "content", "calls", "kept"),
    [
        ("one STOP two<|im_end|>", STOP, "one ", "one ", 0, "one STOP"),
        ("a STO b", STOP, "a STO b", "a STO b", 0, "a STO b"),
        ("a STO", STOP, "a ", "a STO", 0, "a STO"),
        ("a👩", {}, "a👩", "a👩", 0, "a👩"),
        (f"Let me.\n{CALL}\n{CALL}<|im_end|>", {"tools": TOOLS}, "Let me.", "Let me.", 2, None),
        (f"Before {CALL} after<|im_end|>", {"tools": TOOLS}, "Before", "Before after", 1, None),
        (f"{THOUGHT}<|im_end|>", {"tools": TOOLS}, *[THOUGHT] * 2, 0, None),
    ],
    ids=[
        "stop string",
        "no stop string",
        "half a stop string",
        "a character of four tokens",
        "two calls",
        "words behind a call",
        "thinking",
    ],
)
def test_what_is_held_back_is_shown_once_it_is_none(
    detokenizer: Detokenizer,
    encode: Any,
    text: str,
    fields: dict[str, Any],
    shown: str,
    content: str,
    calls: int,
    kept: str | None,
) -> None:
    ids = encode(text)
    pieces, choice = read(detokenizer, ids, [], **fields)
    assert ("".join(pieces), choice.content) == (shown, content)
    assert [(one.name, one.arguments) for one in choice.calls] == [("add", {"a": 1})] * calls
    assert len({one.call_id for one in choice.calls}) == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert choice.token_ids == tuple(encode(kept) if kept else ids), "ids that spell a stop string were sampled"


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


def pieces_of(decode: Decode, ids: list[int], cuts: list[int]) -> list[str]:
    stream = TextStream(decode)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    return [*pieces, stream.flush()]


@settings(max_examples=150)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_whole(chat_for: Callable[..., ChatTokens], data: st.DataObject) -> None:
    """Ids at random are mostly broken characters: the worst case, which a young policy samples."""
    chat = chat_for()
    one = st.integers(0, len(chat.tokenizer) - 1)
    garbage = st.sampled_from(chat.encode("日本👩‍👩‍👧é")) | one
    ids = data.draw(st.lists(garbage, max_size=120))
    pieces = pieces_of(chat.decode, ids, data.draw(st.lists(st.integers(0, 200), max_size=60)))
    assert "".join(pieces) == chat.decode(ids)


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_text_comes_through_and_no_half_character_is_shown(chat_for: Callable[..., ChatTokens], text: str) -> None:
    chat = chat_for()
    ids = chat.encode(text)
    pieces = pieces_of(chat.decode, ids, list(range(len(ids))))
    assert "".join(pieces) == text
    assert UNSETTLED in text or not any(UNSETTLED in piece for piece in pieces)


@lru_cache
def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: a space is dropped at the beginning, unknown characters are one token per byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@settings(max_examples=100)
@given(text=st.text(st.sampled_from("ab é日👩\n"), max_size=40), cuts=st.lists(st.integers(0, 200), max_size=60))
def test_characters_spelled_byte_by_byte_come_through_too(text: str, cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert "".join(pieces_of(tokenizer.decode, ids, cuts)) == text
    assert "".join(pieces_of(tokenizer.decode, ids, list(range(len(ids))))) == text


def test_the_work_per_id_does_not_grow(chat_for: Callable[..., ChatTokens]) -> None:
    """Neither with a long text, nor with broken characters without end."""
    chat = chat_for()
    broken = chat.encode("👩")[1]
    for ids in (chat.encode("a word " * 300), [broken] * 500, chat.encode("日")[:1] * 500):
        sizes: list[int] = []

        def decode(window: list[int], sizes: list[int] = sizes) -> str:
            sizes.append(len(window))
            return chat.decode(window)

        stream = TextStream(decode)
        for one in ids:
            stream.feed([one])
        assert max(sizes) <= 2 * WINDOW_IDS + 1


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_bytes_of_tokens_join_to_the_text(chat_for: Callable[..., ChatTokens], text: str) -> None:
    chat = chat_for()
    token_bytes = token_bytes_of(chat.tokenizer)
    assert b"".join(token_bytes(one) for one in chat.encode(text + "<|im_end|>")) == (text + "<|im_end|>").encode()


def test_every_byte_has_its_character() -> None:
    assert sorted(byte_of_character().values()) == list(range(256))


def test_a_part_of_a_character_is_written_as_bytes() -> None:
    assert token_of(b"\xf0\x9f", -1.0).text == "bytes:\\xf0\\x9f"
    assert token_of("né".encode(), -1.0).text == "né"


def test_an_id_outside_the_vocabulary_spells_nothing(chat_for: Callable[..., ChatTokens]) -> None:
    assert token_bytes_of(chat_for().tokenizer)(10**6) == b""
