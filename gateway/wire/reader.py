"""One answer, read as its ids come: its end, the text that can be shown, and the finished `Choice`.

    ids ──TextStream──► text ──stop strings, calls──► TextDelta (safe to show)   … finish ──► Choice

An answer ends at the id that closes the turn, at the id that completes a stop string, or, without parallel tool calls,
at the id that completes the first call. This is decided id by id and does not depend on how an engine cuts its chunks:
restored from the journal, an answer is the same.

Content is the model's text, character for character, thinking included; nothing is moved to `reasoning_content`. Only
the space between content and the first call is removed. A malformed call stays text, and with it the whole answer: part
of a model's calls must not run as if they were all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from penstock.gateway.wire.types import (
    AnswerHead,
    Choice,
    CompletionRequest,
    EngineFinish,
    Finish,
    SampledToken,
    call_id,
)
from penstock.tools.parsers import ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """Converts one model's ids to text and calls."""

    decode: Decode
    """Keeps special tokens: they may be part of a call's syntax."""
    token_bytes: TokenBytes
    end_ids: frozenset[int]
    """Ids that close a turn; they end an answer and are not part of its text."""
    syntax: CallSyntax


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one `feed` released."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    """Tokens of the ids that were fed, if log-probabilities were requested."""


class AnswerReader:
    """`feed` until the engine is done or `stopped`, then `finish`. One object per choice."""

    def __init__(self, request: CompletionRequest, head: AnswerHead, index: int, detokenizer: Detokenizer) -> None:
        self.stopped = False
        """The answer has ended: further ids are ignored, and the engine's stream can be closed."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._request = request
        self._head = head
        self._index = index
        self._of = detokenizer
        self._stream = TextStream(detokenizer.decode)
        self._shown: list[str] = []
        self._pending_text = ""
        """Final text that was not released. A stop string or a call may begin in it."""
        self._tokens: list[SampledToken] = []
        self._stop_string: str | None = None
        self._one_call = request.reads_calls and not request.parallel_tool_calls

    def feed(self, ids: Sequence[int], logprobs: Sequence[float]) -> TextDelta:
        """Adds ids and as many log-probabilities; ignores those after the end of the answer."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids with {len(logprobs)} log-probabilities")
        taken = len(self.token_ids)
        step = 1 if self._request.stop or self._one_call else max(len(ids), 1)
        for start in range(0, len(ids), step):
            if not self.stopped:
                self._take(ids[start : start + step])
        self.logprobs.extend(logprobs[: len(self.token_ids) - taken])
        if not self._request.logprobs:
            return TextDelta(self._next_text())
        pairs = zip(self.token_ids[taken:], self.logprobs[taken:], strict=True)
        tokens = tuple(token_of(self._of.token_bytes(one), logprob) for one, logprob in pairs)
        self._tokens.extend(tokens)
        return TextDelta(self._next_text(), tokens)

    def finish(self, reason: EngineFinish) -> Choice:
        """The whole answer. `reason` is the engine's; an end found here takes precedence."""
        if not self.stopped:
            self._add(self._stream.flush())
        finish: Finish = "stop" if self.stopped else reason
        text = "".join([*self._shown, self._pending_text])
        content, calls = text, tuple[ToolCall, ...]()
        if self._request.reads_calls and finish != "length":
            content, calls = self._of.syntax.divide(text, self._request.tools)
            numbered = enumerate(calls[:1] if self._one_call else calls)
            answer, index = self._head.answer_id, self._index
            calls = tuple(replace(call, call_id=call_id(answer, index, i)) for i, call in numbered)
        return Choice(
            index=self._index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text=text,
            content=content,
            calls=calls,
            finish_reason="tool_calls" if calls else finish,
            stop_string=self._stop_string,
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
        before = len(self._pending_text)
        self._pending_text += piece
        match = _first_of(self._request.stop, self._pending_text, before)
        if match is not None:
            at, self._stop_string = match
            self._pending_text = self._pending_text[:at]
            self.stopped = True
        elif self._one_call and self._of.syntax.one_is_whole(self._pending_text):
            self.stopped = True

    # text out -------------------------------------------------------------------------------------------------------
    def _next_text(self) -> str:
        """Never more than `finish` will return, whatever follows: released text cannot be taken back."""
        end = len(self._pending_text) - (
            0 if self.stopped else _longest_beginning(self._request.stop, self._pending_text)
        )
        if self._request.reads_calls:
            opening = _longest_beginning((self._of.syntax.parser.opening,), self._pending_text)
            before_call = min(self._of.syntax.start(self._pending_text), len(self._pending_text) - opening, end)
            end = len(self._pending_text[:before_call].rstrip())
        piece, self._pending_text = self._pending_text[:end], self._pending_text[end:]
        self._shown.append(piece)
        return piece


def read_answer(
    request: CompletionRequest,
    head: AnswerHead,
    index: int,
    detokenizer: Detokenizer,
    answer: tuple[Sequence[int], Sequence[float], EngineFinish],
) -> Choice:
    """The choice of a whole answer: (ids, log-probabilities, the engine's reason)."""
    reader = AnswerReader(request, head, index, detokenizer)
    reader.feed(answer[0], answer[1])
    return reader.finish(answer[2])


def _first_of(words: Sequence[str], text: str, before: int) -> tuple[int, str] | None:
    """(start, word) of the first of `words` that ends after `before`; None: there is none."""
    places = [(text.find(word, max(0, before - len(word) + 1)), word) for word in words]
    return min((one for one in places if one[0] >= 0), key=lambda one: one[0], default=None)


def _longest_beginning(words: Sequence[str], text: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `words`."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The form in which one model writes calls, by the marks of its parser.

    Without an `opening`, answers that may hold calls are not streamed; without a `closing`, none is cut after its first
    call.
    """

    parser: ToolCallParser

    def start(self, text: str) -> int:
        """Start of the first call, or the end of `text`."""
        at = text.find(self.parser.opening)
        return at if at >= 0 else len(text)

    def one_is_whole(self, text: str) -> bool:
        """Return True if `text` holds a complete, well-formed call."""
        if not self.parser.closing or self.parser.closing not in text:
            return False
        calls = self.parser.parse(text[self.start(text) :]).calls
        return bool(calls) and calls[0].error is None

    def divide(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """(content, calls). Content always begins with ``text[: start].rstrip()``, which can be released early."""
        start = self.start(text)
        turn = self.parser.parse(text[start:], tools)
        if not turn.calls or any(call.error for call in turn.calls):
            return text, ()
        before = text[:start]
        return (before + turn.content if turn.content else before.rstrip()), turn.calls


Decode = Callable[[Sequence[int]], str]
UNSETTLED = "\ufffd"
WINDOW_IDS = 16
"""Ids kept to decode the next ones with. Text unsettled for twice as long stays broken."""


class TextStream:
    """Decodes ids piece by piece: `feed` them as they come, `flush` once; pieces joined equal ``decode(all ids)``.

    A character can be spread over several tokens and decodes to ``\\ufffd`` until it is complete: text is held back
    from the first ``\\ufffd`` at its end until later tokens settle it. Exact for every sequence of byte-level BPE ids;
    for other vocabularies (SentencePiece with byte fallback) where the ids spell characters.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The newest ids: those whose text may still change, and some before them."""
        self._shown = 0
        """Characters of the window's text that were returned."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is final by now and was not returned yet."""
        if not ids:
            return ""
        text = self._decode([*self._window, *ids])
        if len(ids) > 1 and text.endswith(UNSETTLED):
            return "".join([self.feed([one]) for one in ids])
        self._window.extend(ids)
        # Text that no later id changes; of many broken characters only the last one can change.
        many = len(self._window) > 2 * WINDOW_IDS
        end = len(text) - text.endswith(UNSETTLED) if many else len(text.rstrip(UNSETTLED))
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if len(self._window) > WINDOW_IDS:
            self._shrink(text)
        return piece

    def flush(self) -> str:
        """The text held back; nothing may be fed after this."""
        text = self._decode(self._window) if self._window else ""
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def _shrink(self, text: str) -> None:
        """Forgets old ids. A cut inside a character would change the text after it."""
        broken = text.endswith(UNSETTLED)
        if broken and len(self._window) <= 2 * WINDOW_IDS:
            return
        # Ids kept before new ones: some decoders drop a space at the beginning of a text.
        for size in range(1 if broken else 4, WINDOW_IDS):
            after = self._decode(self._window[-size:])
            fits = self._decode(self._window[:-size]) + after == text if broken else text.endswith(after)
            if after and fits:
                self._window = self._window[-size:]
                self._shown -= len(text) - len(after)
                return


TokenBytes = Callable[[int], bytes]


def token_of(raw: bytes, logprob: float) -> SampledToken:
    """OpenAI writes a token that is a part of a character as ``bytes:\\xf0\\x9f``."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return SampledToken(text, raw, logprob)


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """Bytes of each id of a Hugging Face fast tokenizer: exact for byte-level BPE, else of the decoded text."""
    added = {index: str(token.content).encode() for index, token in tokenizer.added_tokens_decoder.items()}
    decoder = tokenizer.backend_tokenizer.decoder
    state = decoder.__getstate__() if decoder is not None else b""
    if b"ByteLevel" not in (state if isinstance(state, bytes) else json.dumps(state).encode()):
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
    """The byte-level alphabet: printable bytes are themselves, the others characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
