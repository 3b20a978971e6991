"""A stock server as an engine: a child process, spoken to over its own HTTP API alone.

    generate       a swap under way? wait ──► one stream, handed on as it comes
    load_weights   `StockWeights.swap`, while requests are in flight

What all such servers share; `vllm` and `sglang` say what differs.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.answer_stream import AnswerStream, NotAdmitted
from penstock.rollout_server.engines.checkpoint import vocab_size
from penstock.rollout_server.engines.child_server import ChildServer
from penstock.rollout_server.engines.stock_weights import StockWeights
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    Sampling,
    fit_request,
)

HEALTH_S = 15.0
"""A busy machine may keep a sound server from answering for seconds; ending it would cost far more than waiting."""


class StockEngine(ABC):
    """Implements `protocol.Engine`. One event loop owns it."""

    server_class: ClassVar[type[ChildServer]]
    weights_class: ClassVar[type[StockWeights[Any]]]
    routes: ClassVar[tuple[str, ...]]
    """What the server must offer."""
    health_path: ClassVar[str]
    """Answered at once, paused or not, as long as the server can sample."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config = config
        self.model = model
        self.info: EngineInfo | None = None
        self.server = self.server_class(config, model, log_dir, seed)
        self.streams = self.server.streams
        self.weights = self.weights_class(config, model, self.server, self.streams)

    @abstractmethod
    async def _try_out(self) -> list[str]:
        """Sample one token; what this server cannot do. Raises `EngineError` where it cannot sample as we need it."""

    @abstractmethod
    def _check_sampling(self, sampling: Sampling) -> None:
        """Raises `BadRequest` where the server would not do what is asked."""

    @abstractmethod
    def _send(self, request: GenerateRequest) -> AnswerStream:
        """The request, on its way, under `weights.cache_salt`."""

    async def start(self) -> EngineInfo:
        """Start the server, check what it offers, sample one token. Raises `EngineError`."""
        vocabulary = await asyncio.to_thread(vocab_size, self.model)
        installation = await self.server.start()
        try:
            await self._check_routes(installation.version)
            limits = await self._try_out() + await self.weights.start()
        except BaseException:
            await self.server.stop()
            raise
        self.info = EngineInfo(
            name=self.server.product.key,
            engine_version=installation.version,
            version=self.weights.version,
            vocab_size=vocabulary,
            max_model_len=self.config.max_model_len,
            limits=limits,
        )
        return self.info

    async def stop(self) -> None:
        """End the server and everything it started; open answers break off."""
        await self.server.stop()

    async def healthy(self) -> bool:
        """The process lives and what samples in it answers, within `HEALTH_S`."""
        return await self.server.answers(self.health_path, HEALTH_S)

    def stderr_tail(self) -> str:
        """The last lines of the server's log, and how it ended."""
        return self.server.tail()

    async def load_weights(self, manifest: Mapping[str, Any]) -> LoadReport:
        """See `StockWeights.swap`."""
        self._check_running()
        return await self.weights.swap(manifest)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Stream the answer. Raises `BadRequest` (ids outside the vocabulary, too many), `EngineError`."""
        # Servers without a tokenizer die of an id outside the embedding: all requests would be lost.
        request = fit_request(request, self._check_running())
        self._check_sampling(request.sampling)
        deadline = time.monotonic() + self.config.request_timeout_s
        while True:
            pauses = await self.weights.admission.wait(deadline)
            try:
                async with self._answer(request, deadline) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except NotAdmitted:  # some servers refuse what arrives during a pause; it waits here like the others
                if pauses == self.weights.admission.closings:
                    raise

    @asynccontextmanager
    async def _answer(self, request: GenerateRequest, deadline: float) -> AsyncGenerator[AsyncGenerator[Chunk]]:
        stream = self._send(request)
        self.streams.add(stream)
        try:
            async with aclosing(stream.chunks(deadline - time.monotonic())) as chunks:
                yield chunks
        finally:
            self.streams.discard(stream)
            await stream.close()

    def _check_running(self) -> EngineInfo:
        if self.info is None or not self.server.alive:
            raise EngineError(f"{self.server.name} is not running: it {self.server.end_of_it or 'was not started'}")
        return self.info

    async def _check_routes(self, version: str) -> None:
        paths = (await self.server.call("GET", "/openapi.json")).get("paths", {})
        if missing := [route for route in self.routes if route not in paths]:
            text = f"{self.server.name} {version} does not offer {', '.join(missing)}; take one that does"
            raise EngineError(text, retryable=False)
