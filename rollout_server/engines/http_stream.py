"""One streamed answer of an HTTP engine: ids, logprobs, and the version that sampled each token.

    server-sent events ──► reader task: append, with the version that sampled them
                                │ wakes
    consumer  ◄── Chunk ── chunks(): the first tokens at once, then what arrived within `COALESCE_S`

Servers report version spans only with the last event. Tokens whose version is certain on receipt are passed on before
it; others wait for it (empty chunks show meanwhile that the server samples). The report verifies the labels of each
answer: a difference is an error, never a guess. Tokens of weights that are still being compared wait for that verdict
in the same way, between `hold` and `release`.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

import aiohttp

from penstock.rollout_server.protocol import Chunk, EngineError, FinishReason, VersionsDisproved, slice_spans


class NotAdmitted(EngineError):
    """The server takes no requests just now (503): it pauses."""


COALESCE_S = 0.5
"""Tokens that arrive within this time travel on in one chunk: handing one on costs more than ten tokens' parsing."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""`chunks` has its own."""
LAST_EVENT_S = 2.0
"""Servers mark the end of the stream right after the finish reason."""


class AnswerStream(ABC):
    """One answer. `chunks` is read once; `close` ends the request in the engine if it still runs."""

    engine: ClassVar[str]
    """The server's name, for messages."""
    path: ClassVar[str]
    """Of the route that streams."""

    def __init__(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        self.received = 0
        self.received_at = 0.0
        """When the last tokens came (monotonic); 0.0 before the first ones."""
        self.finish_reason: FinishReason | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._certain = 0
        """Positions below have a version that nothing can change any more."""
        self._held_from: int | None = None
        """Positions from here on were sampled by weights that may be other ones than their version's."""
        self._emitted = 0
        self._handed_out = False
        """The consumer heard of the first tokens."""
        self._cuts: list[tuple[int, int]] = []  # (first position, version), ascending
        self._error: EngineError | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._reader = asyncio.create_task(self._read(http, body))

    @property
    def ended(self) -> bool:
        """The answer is complete, or failed."""
        return self.finish_reason is not None or self._error is not None

    async def chunks(self, timeout_s: float) -> AsyncGenerator[Chunk]:
        """The answer's tokens in order; the last chunk carries the finish reason. Raises `EngineError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            await self._wait(deadline, timeout_s)
            if isinstance(self._error, VersionsDisproved):
                raise self._error  # before `_take`: what is left has no known version either
            if chunk := self._take():
                yield chunk
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None and self._emitted == self.received:
                return

    async def close(self) -> None:
        """Servers abort a request whose connection closes; that of a complete answer is kept for the next one."""
        if self.finish_reason is not None:
            await asyncio.wait({self._reader}, timeout=LAST_EVENT_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    def hold(self) -> None:
        """What is received from now on is handed on after `release` only; where that never comes, not at all."""
        if self._held_from is None:
            self._held_from = self.received

    def release(self) -> None:
        self._held_from = None
        self._news.set()

    def break_off(self, why: str) -> None:
        """The server goes; called before its client is closed, which would leave the reader waiting for ever."""
        if not self.ended or (self._error is None and self._free < self.received):
            self._error = EngineError(f"{self.engine} broke off the answer: {why}")
            self._reader.cancel()
            self._news.set()

    @abstractmethod
    def _receive(self, event: dict[str, Any]) -> None:
        """Take one event apart: `_add` its tokens, and `_end` the answer at the last."""

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
        self.received_at = time.monotonic()

    def _end(self, reason: FinishReason, reported: list[tuple[int, int]] | None) -> None:
        """`reported`: the server's own (first position, version) of the whole answer, the truth where it has one."""
        if reported:
            self._believe(reported)
        elif self._certain < self.received:
            raise EngineError(f"{self.engine} ended the answer without the versions of its tokens")
        self._certain = self.received
        self.finish_reason = reason

    def _believe(self, reported: list[tuple[int, int]]) -> None:
        """What was handed on already must agree with the server's versions."""
        if slice_spans(reported, 0, self._emitted) != slice_spans(self._cuts, 0, self._emitted):
            raise VersionsDisproved(
                f"(position, version) on receipt {self._cuts} differ from {self.engine}'s own {reported}"
            )
        self._cuts = reported

    async def _wait(self, deadline: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._news.wait()
        except TimeoutError as error:
            raise EngineError(f"no answer within {timeout_s} s") from error
        self._news.clear()

    def _wake(self) -> None:
        """Wakes the consumer: for the first tokens and for the end at once, else once per `COALESCE_S`."""
        if self.ended or not self._handed_out:
            self._news.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._time_is_up)

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
        )

    async def _read(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        try:
            async with http.post(self.path, json=body, timeout=NO_TIMEOUT) as response:
                await self._read_events(response)
        except (aiohttp.ClientError, RuntimeError) as error:  # the last: the client was closed by `stop`
            self._error = EngineError(f"{self.engine} broke off the answer: {error!r}")
        except (LookupError, TypeError, ValueError) as error:
            self._error = EngineError(f"{self.engine} sent an event of another form than expected: {error!r}")
        except EngineError as error:
            self._error = error
        finally:
            self._news.set()

    async def _read_events(self, response: aiohttp.ClientResponse) -> None:
        if response.status != HTTPStatus.OK:
            raise refusal(self.engine, response.status, await response.read())
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    self._take_apart(json.loads(line[6:]))
            self._wake()
        if not self.ended:
            raise EngineError(f"{self.engine} ended the answer without a finish reason")

    def _take_apart(self, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            raise EngineError(f"{self.engine}: {error.get('message', error)}", retryable=error.get("code", 500) >= 500)
        self._receive(event)


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
