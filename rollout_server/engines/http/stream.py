"""One streamed answer of an HTTP engine: ids, logprobs, and the version that sampled each token.

    server-sent events ──► receives: kept as bytes; `relabel` takes apart what came under the version before
                                │ wakes
    consumer  ◄── Chunk ── chunks(): the first tokens at once, then what arrived within `COALESCE_S`, by `read`

Servers report version spans only with the last event. Tokens whose version is certain on receipt are passed on before
it; others wait for it (empty chunks show meanwhile that the server samples). The report verifies the labels of each
answer: a difference is an error, never a guess. Tokens of weights that are still being compared wait for that verdict
in the same way, between `hold` and `release`.

Bytes are taken apart when their tokens are needed, not when they come: many events at a time cost half. `relabel` takes
apart what came before it, so that every token has the version of the moment at which it was received.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from penstock.rollout_server.engines.http.event_client import EventClient
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    FinishReason,
    GenerateRequest,
    VersionsDisproved,
    slice_spans,
)
from penstock.rollout_server.routed_experts import MixtureLayers


class NotAdmitted(EngineError):
    """The server takes no requests just now (503): it pauses."""


COALESCE_S = 0.5
"""Tokens that arrive within this time travel on in one chunk: handing one on costs more than ten tokens' parsing."""
AnswerEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """Expected shape of an answer's routed experts."""

    layers: MixtureLayers
    context: int
    """Tokens of the request."""
    start: int
    """Position from which on they are asked for."""

    def block(self, rows: NDArray[Any], sampled: int) -> str:
        """Raises `ValueError`."""
        return self.layers.block(rows, self.context + sampled - 1 - self.start)

    @classmethod
    def of(cls, request: GenerateRequest, layers: MixtureLayers | None) -> RoutedAnswer | None:
        start = request.routed_experts_from
        return None if start is None or layers is None else cls(layers, len(request.token_ids), start)


class AnswerStream(ABC):
    """One answer: the `ResponseSink` of its request. `chunks` is read once; `close` ends a request that still runs."""

    engine: ClassVar[str]
    """The server's name, for messages."""
    path: ClassVar[str]
    """Path of the route that streams."""

    def __init__(
        self, events: EventClient, body: dict[str, Any], version: int, routed: RoutedAnswer | None = None
    ) -> None:
        """`version`: what the server holds now."""
        self._routed = routed
        self._experts: list[str] = []
        """Blocks of the whole answer, sent with the last event."""
        self.received = 0
        """Tokens, of the bytes that were taken apart: see `read`."""
        self.received_at = 0.0
        """When the last bytes came (monotonic); 0.0 before the first ones."""
        self.finish_reason: FinishReason | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._certain = 0
        """Positions below have a version that nothing can change any more."""
        self._held_from: int | None = None
        """Positions from here on were sampled by weights that may be other ones than their version's."""
        self._emitted = 0
        self._handed_out = False
        """The consumer heard of the first tokens, or is in no hurry for them."""
        self._cuts: list[tuple[int, int]] = []  # (first position, version), ascending
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        """Received parts of the body that are not parsed yet; of a refusal the whole body."""
        self._rest = b""
        """The beginning of an event whose end has not come."""
        self._label = version
        """The version under which `_pieces` came."""
        self._over = False
        """Nothing more comes."""
        self._exchange = events.post(self.path, to_json(body), self)

    @property
    def ended(self) -> bool:
        """The answer is complete, or failed."""
        return self.finish_reason is not None or self._error is not None

    async def chunks(self, timeout_s: float) -> AsyncGenerator[Chunk]:
        """The answer's tokens in order; the last chunk carries the finish reason. Raises `EngineError`."""
        late = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._expire, timeout_s)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                self.read()
                if isinstance(self._error, VersionsDisproved):
                    raise self._error  # before `_take`: what is left has no known version either
                if chunk := self._take():
                    yield chunk
                if self._error is not None:
                    raise self._error
                if self.finish_reason is not None and self._emitted == self.received:
                    return
        finally:
            late.cancel()

    async def close(self) -> None:
        """Servers abort a request whose connection closes; that of a complete answer is kept for the next one."""
        try:
            self.read()
            if self.finish_reason is not None:
                with contextlib.suppress(TimeoutError):
                    # Servers mark the end of the stream right after the finish reason.
                    async with asyncio.timeout(2.0):
                        while not self._over:
                            self._news.clear()
                            await self._news.wait()
        finally:
            self._exchange.close()
            if self._timer is not None:
                self._timer.cancel()

    def hold_first(self) -> None:
        """The first tokens wait for those of `COALESCE_S`, as all others do; called before anything is received."""
        self._handed_out = True

    def hold(self) -> None:
        """Holds back all tokens that are received from now on, until `release`."""
        self.read()
        if self._held_from is None:
            self._held_from = self.received

    def release(self) -> None:
        self._held_from = None
        self._news.set()

    def break_off(self, why: str) -> None:
        """The server goes: what came is handed on, then the cause."""
        self.read()
        if not self.ended or (self._error is None and self._free < self.received):
            self._error = EngineError(f"{self.engine} broke off the answer: {why}")
            self._over = True
            self._exchange.close()
            self._news.set()

    def relabel(self, version: int) -> None:
        """Labels tokens that are received from now on with `version`, if events have no label of their own."""
        self.read()
        self._label = version

    def read(self) -> None:
        """Parses the received bytes; a mistake in them ends the answer."""
        if not self._pieces or self._status != HTTPStatus.OK or self._error is not None:
            return
        *lines, self._rest = b"".join((self._rest, *self._pieces)).split(b"\n")
        self._pieces = []
        try:
            self._receive(self._sound(_events([line[6:] for line in lines if line.startswith(b"data: {")])))
        except EngineError as error:
            self._error = error
        except (LookupError, TypeError, ValueError) as error:
            self._error = EngineError(f"{self.engine} sent an event of another form than expected: {error!r}")

    def _sound(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        """The events before one with an error. Raises `EngineError`."""
        for event in events:
            if error := event.get("error"):
                text = f"{self.engine}: {error.get('message', error)}"
                raise EngineError(text, retryable=error.get("code", 500) >= 500)
            yield event

    # ResponseSink --------------------------------------------------------------------------------------------------
    def begins(self, status: int) -> None:
        self._status = status

    def receives(self, data: bytes) -> None:
        """Wakes the consumer for the first tokens at once, then once per `COALESCE_S`."""
        self.received_at = time.monotonic()
        self._pieces.append(data)
        if not self._handed_out:
            self._news.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._time_is_up)

    def ends(self, cause: str) -> None:
        self._over = True
        self.read()
        if self.ended:
            pass
        elif self._status not in (0, HTTPStatus.OK):
            self._error = refusal(self.engine, self._status, b"".join(self._pieces))
        elif cause:
            self._error = EngineError(f"{self.engine} broke off the answer: {cause}")
        else:
            self._error = EngineError(f"{self.engine} ended the answer without a finish reason")
        self._news.set()

    @abstractmethod
    def _receive(self, events: Iterable[AnswerEvent]) -> None:
        """Takes events apart: `_add` their tokens, and `_end` the answer at the last. What comes before one that cannot
        be read is added before the error."""

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, *, certain: bool = True) -> None:
        """`certain`: no server's report can say another version."""
        if len(token_ids) != len(logprobs):
            raise EngineError(f"{self.engine} sent {len(token_ids)} tokens with {len(logprobs)} logprobs")
        self._token_ids += token_ids
        self._logprobs += logprobs
        if token_ids and (not self._cuts or self._cuts[-1][1] != version):
            self._cuts.append((self.received, version))
        if certain and self._certain == self.received:
            self._certain += len(token_ids)
        self.received += len(token_ids)

    def _end(self, reason: FinishReason, spans: Sequence[Mapping[str, Any]] | None, experts: str | None) -> None:
        """The last event. `spans`: the server's own versions of the whole answer, the truth if it reports them.
        `experts`: see `_route`."""
        self._route(experts, reason)
        if spans:
            reported = [(span["start"], version_of(span["version"])) for span in spans]
            # What was handed on already must agree with the server's versions.
            if slice_spans(reported, 0, self._emitted) != slice_spans(self._cuts, 0, self._emitted):
                raise VersionsDisproved(
                    f"(position, version) on receipt {self._cuts} differ from {self.engine}'s own {reported}"
                )
            self._cuts = reported
        elif self._certain < self.received:
            raise EngineError(f"{self.engine} ended the answer without the versions of its tokens")
        self._certain = self.received
        self.finish_reason = reason

    def _route(self, routed: str | None, reason: FinishReason) -> None:
        """Keeps the routed experts of the whole answer, as the server sends them. Raises `EngineError`."""
        if self._routed is None:
            return
        if not routed:
            if reason != "abort":
                raise EngineError(f"{self.engine} sent no routed experts with the answer", retryable=False)
            return
        try:
            self._experts = [self._routed.block(self._rows(routed), self.received)]
        except ValueError as error:
            raise EngineError(f"{self.engine} sent no routed experts: {error}", retryable=False) from error

    @abstractmethod
    def _rows(self, encoded: str) -> NDArray[Any]:
        """[positions, all layers, k]. Raises `ValueError`."""

    def _expire(self, timeout_s: float) -> None:
        self.read()
        if self._error is None and (self.finish_reason is None or self._free < self.received):
            self._error = EngineError(f"no answer within {timeout_s} s")
        self._news.set()

    def _time_is_up(self) -> None:
        self._timer = None
        self._news.set()

    @property
    def _free(self) -> int:
        """Positions below may be handed on."""
        return self._certain if self._held_from is None else min(self._certain, self._held_from)

    def _take(self) -> Chunk | None:
        """Everything that may be handed on and was not yet; None where nothing was received."""
        if not self._token_ids and self.finish_reason is None:
            return None
        start, end, self._emitted, self._handed_out = self._emitted, self._free, self._free, True
        token_ids, self._token_ids = self._token_ids[: end - start], self._token_ids[end - start :]
        logprobs, self._logprobs = self._logprobs[: end - start], self._logprobs[end - start :]
        return Chunk(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=slice_spans(self._cuts, start, end),
            finish_reason=self.finish_reason if end == self.received else None,
            routed_experts=self._experts if end == self.received and self.finish_reason else [],
        )


def _events(lines: list[bytes]) -> Iterable[AnswerEvent]:
    """Parsed together, which costs less. A line that is not JSON raises `ValueError` after the events before it."""
    try:
        events: list[AnswerEvent] = from_json(b"[%b]" % b",".join(lines))
    except ValueError:
        return map(from_json, lines)
    return events


def refusal(engine: str, status: int, body: bytes) -> EngineError:
    """A server's answer to a bad request; 4xx would be refused by any other server too."""
    try:
        answer = json.loads(body)
        message = answer.get("message") or answer["error"]
        message = message.get("message", message) if isinstance(message, dict) else message
    except (ValueError, KeyError, TypeError, AttributeError):
        message = body.decode(errors="replace")[:500]
    kind = NotAdmitted if status == HTTPStatus.SERVICE_UNAVAILABLE else EngineError
    return kind(f"{engine} answered {status}: {message}", retryable=status >= 500)


def version_of(label: str) -> int:
    """Policy version of a server's label; it may start as "default", which is the model folder: version 0."""
    return 0 if label == "default" else int(label)
