"""Single tokens: their bytes joined are the answer's bytes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.agent_loops import ChatTokens
from penstock.gateway.wire import byte_of_character, token_bytes_of, token_of


@settings(max_examples=100, deadline=None)
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
