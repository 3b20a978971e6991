"""Dead letters for the page."""

from __future__ import annotations

from typing import Any

from penstock.dashboard.decode import Decode
from penstock.dashboard.plain import plain
from penstock.transfer_queue import DeadLetter, JournalEntry


def letter_line(letter: DeadLetter) -> dict[str, Any]:
    """One line of the list."""
    outcome = letter.outcome
    return {
        "episode": letter.episode_id,
        "component": outcome.component,
        "reason": outcome.reason,
        "kind": str(outcome.kind),
        "attempts": letter.attempts,
        "events": len(letter.journal),
    }


def whole_letter(letter: DeadLetter, decode: Decode | None) -> dict[str, Any]:
    """With what the episode had done, in order."""
    return {**letter_line(letter), "journal": [_event(entry, decode) for entry in letter.journal]}


def _event(entry: JournalEntry, decode: Decode | None) -> dict[str, Any]:
    ids = [] if entry.ids is None else entry.ids.tolist()
    text = decode(ids) if decode is not None else " ".join(map(str, ids))
    return {
        "kind": str(entry.kind),
        "tokens": len(ids),
        "text": text,
        "versions": plain(entry.version_spans) or [],
        "data": plain(entry.data),
    }
