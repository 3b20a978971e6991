"""Ids to text for dead letters, whose journals hold ids alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


@lru_cache(maxsize=8)
def decoder_of(model: str) -> Decode | None:
    """From the tokenizer in a model's folder; None where it is not on this machine."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode
