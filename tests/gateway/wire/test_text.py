"""Ids to text in pieces: the pieces joined are the text of all ids, whatever the ids and the pieces are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from penstock.agent_loops import ChatTokens
from penstock.gateway.wire import UNSETTLED, WINDOW_IDS, Decode, TextStream


def pieces_of(decode: Decode, ids: list[int], cuts: list[int]) -> list[str]:
    stream = TextStream(decode)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    return [*pieces, stream.flush()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_whole(chat_for: Callable[..., ChatTokens], data: st.DataObject) -> None:
    """Ids at random are mostly broken characters: the worst case, which a young policy samples."""
    chat = chat_for()
    one = st.integers(0, len(chat.tokenizer) - 1)
    garbage = st.sampled_from(chat.encode("日本👩‍👩‍👧é")) | one
    ids = data.draw(st.lists(garbage, max_size=120))
    pieces = pieces_of(chat.decode, ids, data.draw(st.lists(st.integers(0, 200), max_size=60)))
    assert "".join(pieces) == chat.decode(ids)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab é日👩\n"), max_size=40), cuts=st.lists(st.integers(0, 200), max_size=60))
def test_characters_spelled_byte_by_byte_come_through_too(text: str, cuts: list[int]) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert "".join(pieces_of(tokenizer.decode, ids, cuts)) == text
    assert "".join(pieces_of(tokenizer.decode, ids, list(range(len(ids))))) == text


def test_a_character_of_four_tokens_is_shown_when_the_last_has_come(chat_for: Callable[..., ChatTokens]) -> None:
    chat = chat_for()
    ids = chat.encode("👩")
    assert len(ids) == 4
    stream = TextStream(chat.decode)
    assert [stream.feed([one]) for one in ids] == ["", "", "", "👩"]
    assert stream.flush() == ""


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
