"""The one thing an agent worker needs of rollout servers, and a deterministic fake of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.rollout_server.protocol import FinishReason, GenerateRequest, Generation


class GenerateClient(Protocol):
    """Called by `EpisodeLLM` for every model call and by the worker before it leases."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole answer to one context. Raises where no server gave one within the client's deadline."""

    async def best_version(self) -> int | None:
        """Newest policy version among servers that accept work; None where there is none."""


class FakeClient:
    """Answers each context with ``reply(context)``, at once or after `latency_s`; every token has logprob -0.5.

    Replies longer than ``max_new_tokens`` are cut with finish reason ``length``. `requests` keeps what was asked.
    """

    def __init__(
        self, reply: Callable[[list[int]], Sequence[int]], *, version: int | None = 0, latency_s: float = 0.0
    ) -> None:
        self.version = version
        self.requests: list[GenerateRequest] = []
        self._reply = reply
        self._latency_s = latency_s

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self._latency_s)
        whole = list(self._reply(request.token_ids))
        ids = whole[: request.sampling.max_new_tokens]
        reason: FinishReason = "stop" if len(ids) == len(whole) else "length"
        return Generation(ids, [-0.5] * len(ids), [(self.version or 0, 0, len(ids))], reason)

    async def best_version(self) -> int | None:
        return self.version
