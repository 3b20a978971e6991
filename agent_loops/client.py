"""The one thing an agent worker needs of rollout servers, and a deterministic fake of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from penstock.rollout_server import Chunk, FinishReason, GenerateRequest, Generation


class GenerateClient(Protocol):
    """Called by `EpisodeLLM` for every model call and by the worker before it leases."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole answer to one context. Raises where no server gave one within the client's deadline."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """The same answer as it grows; `version_spans` count from the start of each chunk.

        The last chunk, and no other, carries `finish_reason`, ``stop`` or ``length``. Raises as `generate` does.
        Closing the generator early gives the answer up.
        """
        yield Chunk()

    async def best_version(self) -> int | None:
        """Newest policy version among servers that accept work; None where there is none."""


class FakeClient:
    """Answers each context with ``reply(context)``, at once or after `latency_s`; every token has logprob -0.5.

    Replies longer than ``max_new_tokens`` are cut with finish reason ``length``. A stream brings one token per chunk.
    `requests` keeps what was asked; `reply` may be exchanged.
    """

    def __init__(
        self, reply: Callable[[list[int]], Sequence[int]], *, version: int | None = 0, latency_s: float = 0.0
    ) -> None:
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.reply = reply
        self._latency_s = latency_s

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self._latency_s)
        whole = list(self.reply(request.token_ids))
        ids = whole[: request.sampling.max_new_tokens]
        reason: FinishReason = "stop" if len(ids) == len(whole) else "length"
        return Generation(ids, [-0.5] * len(ids), [(self.version or 0, 0, len(ids))], reason)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        answer = await self.generate(request)
        spans, last = [(self.version or 0, 0, 1)], len(answer.token_ids) - 1
        for position, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            reason = answer.finish_reason if position == last else None
            yield Chunk(token_ids=[token], logprobs=[logprob], version_spans=spans, finish_reason=reason)
        if not answer.token_ids:
            yield Chunk(finish_reason=answer.finish_reason)

    async def best_version(self) -> int | None:
        return self.version
