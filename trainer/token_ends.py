"""Which token of a run made which characters of its text, for people who look at single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

CUT = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""
MOST_BYTES = 4
"""Of one character: tokens that wait for longer are no character's beginning."""


def token_ends(ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """[N] how many characters of `text` are there after each token; the last is its length.

    A character that several tokens make counts with the last of them.
    """
    pieces = {number: tokenizer.decode([number], skip_special_tokens=False) for number in set(ids)}
    if "".join(pieces[number] for number in ids) == text:
        return list(accumulate(len(pieces[number]) for number in ids))
    return _in_context(ids, text, tokenizer)


def _in_context(ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """Each token decoded behind those before it: bytes join there, and blanks are kept as decoders keep them."""
    ends: list[int] = []
    behind, read, length = 0, 0, 0
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[behind:end], skip_special_tokens=False)
        if not now.endswith(CUT) or end - read >= MOST_BYTES:
            before = tokenizer.decode(ids[behind:read], skip_special_tokens=False) if read > behind else ""
            length = min(len(text), length + max(0, len(now) - len(before)))
            behind, read = read, end
        ends.append(length)
    return [*ends[:-1], len(text)]
