"""A model's thinking as a separate block, and back to the text that it was.

    <think>\\nhm\\n</think>\\n\\nyes  ──BlockSplitter──►  thinking "hm" · text "yes" · signature (opening, closing)
    thinking "hm" + signature + text "yes"  ──text_before──►  <think>\\nhm\\n</think>\\n\\nyes

The signature holds the marks and the space around the thinking, which no client shows or changes: what a client sends
back is then the answer's text, character for character. Where the prompt opened the thinking, the opening is empty.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
OURS = "penstock."
"""Begins each signature of ours. Others are of thinking that another model wrote."""

Kind = Literal["thinking", "text"]
Piece = tuple[Kind, str]
Stage = Literal["opening", "gap", "thinking", "after", "text"]


def signature_of(opening: str, closing: str) -> str:
    """Returns a block's signature. `opening`, `closing`: the text around the shown thinking, with marks."""
    return OURS + base64.urlsafe_b64encode(json.dumps([opening, closing]).encode()).decode()


def text_before(thinking: str, signature: str) -> str | None:
    """The text of a thinking block, up to the first character of the text after it; None: the signature is not ours."""
    if not signature.startswith(OURS):
        return None
    try:
        opening, closing = json.loads(base64.b64decode(signature[len(OURS) :], altchars=b"-_", validate=True))
        return "".join([opening, thinking, closing])
    except (binascii.Error, ValueError, TypeError, RecursionError):
        return None


class BlockSplitter:
    """Divides an answer's text as it comes: `feed` any number of times, `flush` once.

    The pieces of one kind, joined, do not depend on how the text was cut.
    """

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the prompt opened the thinking, so that the answer begins with it."""
        self.opening, self.closing = "", ""
        self._pending_text = ""
        """Text that may belong to a mark, or to the space next to one."""
        self._stage: Stage = "gap" if inside else "opening"

    @property
    def thinks(self) -> bool:
        """True if the answer began with thinking, as far as it is known."""
        return bool(self.opening) or self._stage in ("thinking", "after") or bool(self.closing)

    @property
    def signature(self) -> str:
        """Final once a piece of text has come, or `flush` was called."""
        return signature_of(self.opening, self.closing)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are final now."""
        self._pending_text += text
        pieces: list[Piece] = []
        before: Stage | None = None
        while before != self._stage:
            before = self._stage
            pieces += getattr(self, f"_in_{before}")()
        return pieces

    def flush(self) -> list[Piece]:
        """The rest of an answer that has ended."""
        text, self._pending_text = self._pending_text, ""
        if self._stage == "opening":
            return [("text", text)] if text.strip() else []
        if self._stage == "thinking":
            shown = text.rstrip()
            self.closing += text[len(shown) :]
            return [("thinking", shown)]
        return []

    # stages: each takes what it can from the held text ---------------------------------------------------------------
    def _in_opening(self) -> list[Piece]:
        begun = self._pending_text.lstrip()
        if begun.startswith(OPEN):
            end = len(self._pending_text) - len(begun) + len(OPEN)
            self.opening, self._pending_text = self._pending_text[:end], self._pending_text[end:]
            self._stage = "gap"
        elif not OPEN.startswith(begun):
            self._stage = "text"
        return []

    def _in_gap(self) -> list[Piece]:
        rest = self._pending_text.lstrip()
        self.opening += self._pending_text[: len(self._pending_text) - len(rest)]
        self._pending_text = rest
        if rest:
            self._stage = "thinking"
        return []

    def _in_thinking(self) -> list[Piece]:
        thought, mark, rest = self._pending_text.partition(CLOSE)
        if not mark:
            thought = thought[: len(thought) - _begun(CLOSE, thought)]
        shown = thought.rstrip()
        if mark:
            self.closing = thought[len(shown) :] + CLOSE
            self._pending_text, self._stage = rest, "after"
        else:
            self._pending_text = self._pending_text[len(shown) :]
        return [("thinking", shown)] if shown or mark else []

    def _in_after(self) -> list[Piece]:
        rest = self._pending_text.lstrip()
        self.closing += self._pending_text[: len(self._pending_text) - len(rest)]
        self._pending_text = rest
        if rest:
            self._stage = "text"
        return []

    def _in_text(self) -> list[Piece]:
        piece, self._pending_text = self._pending_text, ""
        return [("text", piece)] if piece else []


@dataclass(frozen=True, slots=True)
class DividedText:
    """An answer's text, divided into thinking and the rest."""

    thinking: str | None
    """None: it began without any."""
    signature: str
    text: str


def divide(content: str, *, inside: bool) -> DividedText:
    """`content` as a whole."""
    splitter = BlockSplitter(inside=inside)
    pieces = [*splitter.feed(content), *splitter.flush()]
    joined = {kind: "".join(text for one, text in pieces if one == kind) for kind in ("thinking", "text")}
    return DividedText(joined["thinking"] if splitter.thinks else None, splitter.signature, joined["text"])


def _begun(mark: str, text: str) -> int:
    """Length of the longest suffix of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
