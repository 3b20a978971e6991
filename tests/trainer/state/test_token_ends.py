"""Each token's share of the text, whatever the tokenizer does to bytes and blanks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.trainer.state.recorder import token_ends

MODEL = str(Path(__file__).parents[3] / "recipes" / "calculator" / "model")


def cut(text: str, ends: list[int]) -> list[str]:
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    return [text[start:end] for start, end in pairwise([0, *ends])]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def blank_tokenizer() -> PreTrainedTokenizerFast:
    """A decoder that drops the blank in front of the first word: a word alone is not a word in a row."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_real_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode('<tool_call>\n{"code": "12+30"}\n</tool_call><|im_end|>', add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    pieces = cut(text, token_ends(ids, text, tokenizer))
    assert pieces == [tokenizer.decode([number], skip_special_tokens=False) for number in ids]


def test_a_character_of_several_tokens_counts_with_the_last() -> None:
    tokenizer = byte_tokenizer()
    text = "aé𝄞b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert cut(text, token_ends(ids, text, tokenizer)) == ["a", "", "é", "", "", "", "𝄞", "b"]


def test_bytes_that_are_no_character_take_no_time_and_lose_nothing() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("é", add_special_tokens=False)[:1] * 2000 + tokenizer.encode("ok", add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert cut(text, token_ends(ids, text, tokenizer))[-1] == "k"


def test_blanks_are_where_the_decoder_puts_them() -> None:
    tokenizer = blank_tokenizer()
    text = tokenizer.decode([0, 1, 2, 0], skip_special_tokens=False)
    assert text == "the cats the"
    assert cut(text, token_ends([0, 1, 2, 0], text, tokenizer)) == ["the", " cat", "s", " the"]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), blank_tokenizer()])
def test_nothing_has_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert token_ends([], "", tokenizer) == []
