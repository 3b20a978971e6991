"""A rollout client without a server: a function answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from penstock.rollout_server import Chunk, FinishReason, GenerateRequest, Generation


class FakeClient:
    """Answers each context with ``reply(context)``, at once or after `latency_s`; every token has logprob -0.5.

    Replies longer than ``max_new_tokens`` are cut with finish reason ``length``. A stream has one token per chunk.
    `requests` records the requests; `reply` may be replaced.
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
