"""Long tool results, cut so that the model sees the part that matters and knows that something is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Part = Literal["head", "tail", "middle"]
"""The part that is left out of a long result. ``head`` suits compilers and test runs, which sum up at the end."""
CountTokens = Callable[[str], int]

_WORDS = {"head": "beginning", "tail": "end", "middle": "middle"}


def truncate(text: str, max_chars: int, cut: Part = "middle") -> str:
    """Returns at most `max_chars` characters, with a note on the full length if there is room for it.

    Half of a surrogate pair, which neither a tokenizer nor the journal can hold, becomes ``?``.
    """
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= max_chars:
        return text
    note = f"[... {len(text)} characters in all, {_WORDS[cut]} left out ...]"
    note = f"{'' if cut == 'head' else chr(10)}{note}{'' if cut == 'tail' else chr(10)}"
    room = max_chars - len(note)
    if room <= 0:
        return text[-max_chars:] if cut == "head" else text[:max_chars]
    tail = {"head": room, "tail": 0, "middle": room // 2}[cut]
    return text[: room - tail] + note + text[len(text) - tail :]


def truncate_tokens(text: str, max_tokens: int, count_tokens: CountTokens, max_chars: int, cut: Part = "middle") -> str:
    """At most `max_tokens` tokens, as `count_tokens` counts the result by itself, and at most `max_chars` characters.

    Cut between characters, never inside one: token ids are not sliced, since a slice may end within a code point.
    """
    room = min(len(text), max_chars)
    while True:
        shorter = truncate(text, room, cut)
        tokens = count_tokens(shorter)
        if tokens <= max_tokens or room <= 1:
            return shorter if tokens <= max_tokens else ""
        room = max(1, min(room - 1, room * max_tokens // tokens))
