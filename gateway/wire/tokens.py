"""What single tokens spell: the bytes of each, where the vocabulary says them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from penstock.gateway.wire.types import Token

TokenBytes = Callable[[int], bytes]


def token_of(raw: bytes, logprob: float) -> Token:
    """OpenAI writes a token that is a part of a character as ``bytes:\\xf0\\x9f``."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return Token(text, raw, logprob)


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """The bytes of each id of a Hugging Face fast tokenizer: exact for byte-level BPE, decoded text for others."""
    added = {index: str(token.content).encode() for index, token in tokenizer.added_tokens_decoder.items()}
    if b"ByteLevel" not in _decoder_state(tokenizer):
        return lambda index: added.get(index) or tokenizer.decode([index]).encode()

    def token_bytes(index: int) -> bytes:
        return added[index] if index in added else spelled(tokenizer.convert_ids_to_tokens(index) or "")

    return token_bytes


def spelled(token: str) -> bytes:
    """A token of a byte-level vocabulary as bytes: ``Ġthe`` is ``b" the"``."""
    table = byte_of_character()
    return b"".join(bytes([table[one]]) if one in table else one.encode() for one in token)


@lru_cache
def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_state(tokenizer: Any) -> bytes:
    decoder = tokenizer.backend_tokenizer.decoder
    state = decoder.__getstate__() if decoder is not None else b""
    return state if isinstance(state, bytes) else json.dumps(state).encode()
