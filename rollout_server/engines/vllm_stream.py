"""One request to vLLM's token endpoint, as it arrives: ids, logprobs, and which version sampled each.

    server-sent events ──► reader task: append, label with the version that the engine has now
                                │ wakes
    consumer  ◄── Chunk ── chunks(): whatever arrived within `COALESCE_S`

Only the last event carries vLLM's own version spans, so tokens are labelled on receipt. That is exact because versions
change only while the engine is paused and idle, and only after every token sampled before the pause was received
(`VLLMEngine._settle`). The last event proves it for each answer: a difference is an error, never a guess.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx

from penstock.rollout_server.protocol import Chunk, EngineError, FinishReason
from penstock.rollout_server.spans import slice_spans

COALESCE_S = 0.03
"""Tokens that arrive within this time travel on in one chunk."""
LAST_EVENT_S = 2.0
"""vLLM marks the end of the stream right after the finish reason."""
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class TokenStream:
    """One answer. `chunks` is read once; `close` ends the request in the engine if it still runs."""

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any], current_version: Callable[[], int]) -> None:
        self.received = 0
        self.finish_reason: FinishReason | None = None
        self._current_version = current_version
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._emitted = 0
        self._cuts: list[tuple[int, int]] = []  # (first position, version), ascending
        self._error: EngineError | None = None
        self._news = asyncio.Event()
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
            if chunk := self._take():
                yield chunk
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None and self._emitted == self.received:
                return

    async def close(self) -> None:
        """vLLM aborts a request whose connection closes; that of a complete answer is kept for the next one."""
        if self.finish_reason is not None:
            await asyncio.wait({self._reader}, timeout=LAST_EVENT_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _wait(self, deadline: float, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise EngineError(f"no answer within {timeout_s} s") from error
        if self._emitted and not self.ended:  # the first token waits for no other
            await asyncio.sleep(COALESCE_S)
        if not self.ended:
            self._news.clear()

    def _take(self) -> Chunk | None:
        """Everything received and not yet handed on; None where that is nothing."""
        start, end, self._emitted = self._emitted, self.received, self.received
        if start == end and self.finish_reason is None:
            return None
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        return Chunk(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=slice_spans(self._cuts, start, end),
            finish_reason=self.finish_reason,
        )

    async def _read(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            async with http.stream("POST", "/inference/v1/generate", json=body, timeout=None) as response:
                await self._read_events(response)
        except (httpx.HTTPError, RuntimeError) as error:  # the last: the client was closed by `stop`
            self._error = EngineError(f"vLLM broke off the answer: {error!r}")
        except (LookupError, TypeError, ValueError) as error:
            self._error = EngineError(f"vLLM sent an event of another form than expected: {error!r}")
        except EngineError as error:
            self._error = error
        finally:
            self._news.set()

    async def _read_events(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, await response.aread())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                self._receive(json.loads(line[6:]))
        if not self.ended:
            raise EngineError("vLLM ended the answer without a finish reason")

    def _receive(self, event: dict[str, Any]) -> None:
        if error := event.get("error"):
            raise EngineError(f"vLLM: {error.get('message', error)}", retryable=error.get("code", 500) >= 500)
        for choice in event["choices"]:
            self._append(choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or [])
            if choice["finish_reason"] is not None:
                self._finish(choice)
        self._news.set()

    def _append(self, token_ids: list[int], logprobs: list[dict[str, Any]]) -> None:
        if len(token_ids) != len(logprobs):
            raise EngineError(f"vLLM sent {len(token_ids)} tokens with {len(logprobs)} logprobs")
        self._token_ids += token_ids
        self._logprobs += [entry["logprob"] for entry in logprobs]
        version = self._current_version()
        if token_ids and (not self._cuts or self._cuts[-1][1] != version):
            self._cuts.append((self.received, version))
        self.received += len(token_ids)

    def _finish(self, choice: dict[str, Any]) -> None:
        if choice["finish_reason"] not in _FINISH:
            raise EngineError(f"vLLM ended the answer with {choice['finish_reason']!r}")
        if (reported := choice.get("weight_versions")) is not None:
            self._believe([(span["start"], version_of(span["version"])) for span in reported])
        self.finish_reason = _FINISH[choice["finish_reason"]]

    def _believe(self, reported: list[tuple[int, int]]) -> None:
        """vLLM's versions are the truth; what was handed on already must agree with them."""
        if slice_spans(reported, 0, self._emitted) != slice_spans(self._cuts, 0, self._emitted):
            raise EngineError(f"(position, version) on receipt {self._cuts} differ from vLLM's own {reported}")
        self._cuts = reported


def version_of(label: str) -> int:
    """Policy version of vLLM's label; it starts as "default", which is the model folder: version 0."""
    return 0 if label == "default" else int(label)


def refusal(status: int, body: bytes) -> EngineError:
    """vLLM's answer to a bad request; 4xx would be refused by any other server too."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:500]
    return EngineError(f"vLLM answered {status}: {message}", retryable=status >= 500)
