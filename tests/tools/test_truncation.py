from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tools import truncate, truncate_tokens
from penstock.tools.truncation import Part

PARTS: tuple[Part, ...] = ("head", "tail", "middle")


@pytest.mark.parametrize(
    ("cut", "begins", "ends"),
    [("middle", "0123", "6789"), ("tail", "0123", "end left out ...]"), ("head", "[... 1000 ", "6789")],
)
def test_truncation_what_is_left_out_and_what_stays(cut: Part, begins: str, ends: str) -> None:
    text = "0123456789" * 100
    short = truncate(text, 200, cut)
    assert len(short) == 200
    assert short.startswith(begins)
    assert short.endswith(ends)
    assert "1000 characters in all" in short


def test_half_of_a_surrogate_pair_is_made_encodable() -> None:
    assert truncate("1 \ud83d 2", 100) == "1 ? 2"
    assert truncate_tokens("\udc00" * 3, 100, utf8_tokens, 100) == "???"


def utf8_tokens(text: str) -> int:
    """Like a byte-level tokenizer at its worst."""
    return len(text.encode())


@given(st.text(max_size=500), st.integers(1, 300), st.integers(1, 400), st.sampled_from(PARTS))
def test_truncation_limits_hold_and_no_character_is_split(
    text: str, max_tokens: int, max_chars: int, cut: Part
) -> None:
    short = truncate_tokens(text, max_tokens, utf8_tokens, max_chars, cut)
    assert utf8_tokens(short) <= max_tokens
    assert len(short) <= max_chars
    if utf8_tokens(text) <= max_tokens and len(text) <= max_chars:
        assert short == text


def test_truncation_most_of_the_room_is_used() -> None:
    assert utf8_tokens(truncate_tokens("x" * 10_000, 1000, utf8_tokens, 20_000)) > 900
