"""Long tool results, cut so that the model sees both ends and knows that something is missing."""

from __future__ import annotations


def truncate_middle(text: str, max_chars: int) -> str:
    """At most `max_chars` characters: the first and last parts around a note that says how long the whole was."""
    if len(text) <= max_chars:
        return text
    note = f"\n[... {len(text)} characters in all, middle left out ...]\n"
    room = max_chars - len(note)
    if room <= 0:
        return text[:max_chars]
    tail = room // 2
    return text[: room - tail] + note + (text[-tail:] if tail else "")
