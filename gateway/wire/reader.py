"""One answer read as its ids come: where it ends, what may be shown already, and what it is in the end.

ids ──TextStream──► text ──stop strings, calls──► Delta (safe to show)   … finish ──► Choice

An answer ends at the id that closes the turn, at the id that completes a stop string, or, where one call at a time was
asked for, at the id that completes the first. This is decided id by id, so it does not depend on how an engine
cuts its chunks: read again from a record, an answer is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.wire.calls import CallSyntax, with_ids
from penstock.gateway.wire.text import Decode, TextStream
from penstock.gateway.wire.tokens import TokenBytes, token_of
from penstock.gateway.wire.types import Ask, Choice, EngineFinish, Finish, Head, Token
from penstock.tools.parsers import ToolCall


@dataclass(frozen=True, slots=True)
class TextOf:
    """How one model's ids become what clients read."""

    decode: Decode
    """Special tokens kept: they may be part of a call's syntax."""
    token_bytes: TokenBytes
    end_ids: frozenset[int]
    """Ids that close a turn; they end an answer and are not shown."""
    syntax: CallSyntax


@dataclass(frozen=True, slots=True)
class Delta:
    """What one `feed` added that can be shown."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    """Where log-probabilities were asked for: of the ids that were fed."""


class AnswerReader:
    """`feed` until the engine is done or `stopped`, then `finish`. One object per choice."""

    def __init__(self, ask: Ask, head: Head, index: int, text_of: TextOf) -> None:
        self.stopped = False
        """The answer is over: further ids are ignored, the engine's stream can be closed."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._ask = ask
        self._head = head
        self._index = index
        self._of = text_of
        self._stream = TextStream(text_of.decode)
        self._shown: list[str] = []
        self._held = ""
        """Settled text that was not shown. A stop string or a call that is still to come begins in here, or later."""
        self._tokens: list[Token] = []
        self._one_call = ask.reads_calls and not ask.parallel_tool_calls

    def feed(self, ids: Sequence[int], logprobs: Sequence[float]) -> Delta:
        """Take more of the answer, as many log-probabilities as ids. What lies behind its end is left out."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids with {len(logprobs)} log-probabilities")
        taken = len(self.token_ids)
        step = 1 if self._ask.stop or self._one_call else max(len(ids), 1)
        for start in range(0, len(ids), step):
            if not self.stopped:
                self._take(ids[start : start + step])
        self.logprobs.extend(logprobs[: len(self.token_ids) - taken])
        return Delta(self._next_text(), self._new_tokens(taken))

    def finish(self, reason: EngineFinish) -> Choice:
        """The whole answer. `reason` is the engine's; an end found here outweighs it."""
        if not self.stopped:
            self._add(self._stream.flush())
        finish: Finish = "stop" if self.stopped else reason
        text = "".join([*self._shown, self._held])
        content, calls = self._divide(text, finish)
        return Choice(
            index=self._index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=text,
            content=content,
            calls=calls,
            finish_reason="tool_calls" if calls else finish,
            tokens=tuple(self._tokens),
        )

    # ids in ---------------------------------------------------------------------------------------------------------
    def _take(self, ids: Sequence[int]) -> None:
        shown = next((i for i, one in enumerate(ids) if one in self._of.end_ids), len(ids))
        ended = shown < len(ids)
        self.token_ids.extend(ids[: shown + 1])
        piece = self._stream.feed(ids[:shown])
        self._add(piece + self._stream.flush() if ended else piece)
        self.stopped = self.stopped or ended

    def _add(self, piece: str) -> None:
        if not piece:
            return
        before = len(self._held)
        self._held += piece
        found = _first_of(self._ask.stop, self._held, before)
        if found is not None:
            self._held = self._held[:found]
            self.stopped = True
        elif self._one_call and self._of.syntax.one_is_whole(self._held):
            self.stopped = True

    def _new_tokens(self, taken: int) -> tuple[Token, ...]:
        if not self._ask.logprobs:
            return ()
        pairs = zip(self.token_ids[taken:], self.logprobs[taken:], strict=True)
        new = [token_of(self._of.token_bytes(one), logprob) for one, logprob in pairs]
        self._tokens.extend(new)
        return tuple(new)

    # text out -------------------------------------------------------------------------------------------------------
    def _next_text(self) -> str:
        """Never more than `finish` will show, whatever comes: nothing that was shown can be taken back."""
        end = len(self._held) - (0 if self.stopped else _longest_beginning(self._ask.stop, self._held))
        if self._ask.reads_calls:
            opening = _longest_beginning((self._of.syntax.opening,), self._held)
            before_call = min(self._of.syntax.start(self._held), len(self._held) - opening, end)
            end = len(self._held[:before_call].rstrip())
        piece, self._held = self._held[:end], self._held[end:]
        self._shown.append(piece)
        return piece

    def _divide(self, text: str, finish: Finish) -> tuple[str, tuple[ToolCall, ...]]:
        if not self._ask.reads_calls or finish == "length":
            return text, ()
        content, calls = self._of.syntax.divide(text, self._ask.tools)
        kept = calls[:1] if self._one_call else calls
        return content, with_ids(kept, self._head.answer_id, self._index)


def read_answer(
    ask: Ask,
    head: Head,
    index: int,
    text_of: TextOf,
    answer: tuple[Sequence[int], Sequence[float], EngineFinish],
) -> Choice:
    """A whole answer at once: (ids, log-probabilities, the engine's reason)."""
    reader = AnswerReader(ask, head, index, text_of)
    reader.feed(answer[0], answer[1])
    return reader.finish(answer[2])


def _first_of(words: Sequence[str], text: str, before: int) -> int | None:
    """Where the first of `words` begins that ends behind `before`."""
    found = [text.find(word, max(0, before - len(word) + 1)) for word in words]
    return min((at for at in found if at >= 0), default=None)


def _longest_beginning(words: Sequence[str], text: str) -> int:
    """Length of the longest end of `text` that one of `words` may go on from."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
