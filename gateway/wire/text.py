"""Ids to text, some at a time, so that the pieces joined are the text of all ids.

A character can be spread over several tokens: decoded too early it reads ``\\ufffd``. So what is decoded is held back
from the first ``\\ufffd`` at its end on, until later tokens settle it. Exact for every sequence of ids of a byte-level
BPE; for other vocabularies (SentencePiece that spells unknown characters byte by byte) where the ids spell characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

UNSETTLED = "\ufffd"
WINDOW_IDS = 16
"""Ids that are kept to decode the next ones with. What is unsettled for twice as long is broken for good."""
CONTEXT_IDS = 4
"""Kept in front of new ids: some decoders drop a space at the beginning of a text."""


class TextStream:
    """`feed` ids as they come, `flush` once at the end. Pieces joined equal ``decode(all ids)``."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The newest ids: those whose text may change, and some before them."""
        self._shown = 0
        """Characters of the window's text that were given out."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is settled by now and was not given out yet."""
        if not ids:
            return ""
        text = self._decode([*self._window, *ids])
        if len(ids) > 1 and text.endswith(UNSETTLED):
            return "".join([self.feed([one]) for one in ids])
        self._window.extend(ids)
        end = self._settled(text)
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if len(self._window) > WINDOW_IDS:
            self._shrink(text)
        return piece

    def flush(self) -> str:
        """What was held back; nothing may be fed after this."""
        text = self._decode(self._window) if self._window else ""
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _settled(self, text: str) -> int:
        """How much of the window's text no later id changes. Of many broken characters, only the last may."""
        if len(self._window) > 2 * WINDOW_IDS:
            return len(text) - text.endswith(UNSETTLED)
        return len(text.rstrip(UNSETTLED))

    def _shrink(self, text: str) -> None:
        """Forget old ids. A cut inside a character would make what comes behind it read differently."""
        broken = text.endswith(UNSETTLED)
        if broken and len(self._window) <= 2 * WINDOW_IDS:
            return
        for kept in range(1 if broken else CONTEXT_IDS, WINDOW_IDS):
            after = self._decode(self._window[-kept:])
            fits = self._decode(self._window[:-kept]) + after == text if broken else text.endswith(after)
            if after and fits:
                self._window = self._window[-kept:]
                self._shown -= len(text) - len(after)
                return
