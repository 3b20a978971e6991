"""An inference server with an HTTP API (vLLM, SGLang) as an engine: a child process, used over that API alone.

    generate       wait while weights are swapped ──► one stream, passed on as it arrives
    load_weights   `HttpWeights.swap` (`weights`), while requests are in flight

`vllm` and `sglang` add what differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.adapters import AdapterSlots
from penstock.rollout_server.engines.checkpoint import fetch_model, layers_with_experts, vocab_size
from penstock.rollout_server.engines.http.drafts import Sampled, Scored, check_drafts, draft_method
from penstock.rollout_server.engines.http.server_process import ChildServer
from penstock.rollout_server.engines.http.stream import AnswerStream, NotAdmitted
from penstock.rollout_server.engines.http.weights import HttpWeights
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import (
    Chunk,
    DeviceBytes,
    EngineError,
    EngineInfo,
    GenerateRequest,
    Sampling,
    SleepLevel,
    fit_request,
)
from penstock.rollout_server.routed_experts import MixtureLayers
from penstock.weight_sync import LoadReport, Manifest

logger = logging.getLogger(__name__)
HEALTH_S = 15.0
"""A busy machine may keep a sound server from answering for seconds; ending it would cost far more than waiting."""


class HttpEngine(ABC):
    """Implements `protocol.Engine`. One event loop owns it."""

    server_class: ClassVar[type[ChildServer]]
    weights_class: ClassVar[type[HttpWeights[Any]]]
    weights: HttpWeights[Any]
    routes: ClassVar[tuple[str, ...]]
    """Routes that the server must offer."""
    sleep_routes: ClassVar[tuple[str, ...]]
    """Further ones, if it shares devices with the trainer."""
    adapter_routes: ClassVar[tuple[str, str]]
    """Routes that load and unload an adapter, if requests may name one."""
    health_path: ClassVar[str]
    """Answered at once, paused or not, as long as the server can sample."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config = config
        self.model = model
        """Folder or hub name; from the start on the folder."""
        self.info: EngineInfo | None = None
        self.layers: MixtureLayers | None = None
        """Layers of a mixture whose routed experts the server reports."""
        self.server = self.server_class(config, model, log_dir, seed)
        self.streams = self.server.streams
        self.weights = self.weights_class(config, model, self.server, self.streams)
        self.adapters = AdapterSlots(self._load_adapter, self._unload_adapter, config.request_timeout_s)

    @abstractmethod
    async def _try_out(self) -> list[str]:
        """Sample one token; what this server cannot do. Raises `EngineError` if it cannot sample as we need it."""

    @abstractmethod
    async def _sample(self, token_ids: list[int], count: int) -> Sampled:
        """An answer of `count` tokens at temperature 1. Raises `EngineError`."""

    @abstractmethod
    async def _score(self, token_ids: list[int]) -> Sequence[Scored]:
        """Judges all ids but the first, by one pass over them. Raises `EngineError`."""

    @abstractmethod
    def _check_sampling(self, sampling: Sampling) -> None:
        """Raises `BadRequest` where the server would not do what is asked."""

    @abstractmethod
    def _send(self, request: GenerateRequest, seen: Sequence[SeenImage], adapter: str | None) -> AnswerStream:
        """The request, on its way, under `weights.cache_salt`, with its images, to the adapter of this name. Raises
        `BadRequest` for images that do not fit its ids."""

    @property
    def sees_images(self) -> bool:
        """Requests may have images."""
        return False

    async def _see(self, request: GenerateRequest) -> Sequence[SeenImage]:
        """The request's images as the server takes them. Raises `BadRequest`, `EngineError`."""
        return ()

    async def start(self) -> EngineInfo:
        """Start the server, check what it offers, sample one token. Raises `EngineError`."""
        # The server gets the folder: by the name in a hub it would look for the model again, and may find another one.
        self.model = self.server.model = self.weights.model = str(await asyncio.to_thread(fetch_model, self.model))
        vocabulary = await asyncio.to_thread(vocab_size, self.model)
        if self.config.routing_replay and self.config.pause == "recompute":
            # Rows are kept by position: what is computed again takes the place of the pass that sampled.
            raise EngineError(
                "rollout.routing_replay: rollout.pause=recompute would report the experts of other weights than"
                " sampled; set it to keep or abort",
                retryable=False,
            )
        if self.config.routing_replay:
            self.layers = await asyncio.to_thread(layers_with_experts, self.model)
        installation = await self.server.start()
        try:
            paths = (await self.server.call("GET", "/openapi.json")).get("paths", {})
            needed = [*self.routes, *(self.sleep_routes if self.server.sleep_level else ())]
            needed += self.adapter_routes if self.config.adapter_rank else ()
            if missing := [route for route in needed if route not in paths]:
                text = (
                    f"{self.server.name} {installation.version} does not offer {', '.join(missing)}; take one that does"
                )
                raise EngineError(text, retryable=False)
            limits = await self._try_out() + await self.weights.start()
            await self._check_drafts(vocabulary)
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
            images=self.sees_images,
            routed_experts=self.layers is not None,
            adapter_rank=self.config.adapter_rank,
        )
        return self.info

    async def _check_drafts(self, vocabulary: int) -> None:
        """Raises `EngineError` if tokens or logprobs behind drafts are wrong."""
        key = f"{self.server.product.key}_args"
        if method := draft_method(getattr(self.config, key)):
            await check_drafts(
                f"rollout.{key}: speculative decoding by {method}",
                vocabulary=vocabulary,
                dtype=self.config.dtype,
                longest=self.config.max_model_len,
                sample=self._sample,
                score=self._score,
            )

    async def stop(self) -> None:
        """End the server and everything it started; open answers break off."""
        try:
            await self.server.stop()
        finally:
            self.weights.admission.open()  # requests that wait there find the server gone
        await self.weights.until_verified()

    def will_sleep(self, level: SleepLevel) -> None:
        self.server.sleep_level = level

    async def device_bytes(self) -> DeviceBytes:
        """See `SleepingEngine`: the server does not say."""
        return DeviceBytes(0, 0)

    async def sleep(self, level: SleepLevel) -> None:
        self._check_running()
        await self.weights.sleep(level)

    async def wake(self) -> None:
        self._check_running()
        await self.weights.wake()

    async def healthy(self) -> bool:
        """The process lives and what samples in it answers, within `HEALTH_S`."""
        return await self.server.answers(self.health_path, HEALTH_S)

    def stderr_tail(self) -> str:
        """Returns the last lines of the server's log, and how the server ended."""
        return self.server.tail()

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        self._check_running()
        return await self.weights.swap(manifest)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Stream the answer. Raises `BadRequest` (ids outside the vocabulary, too many; images that are none, or do not
        fit the ids), `EngineError`."""
        # Servers without a tokenizer die of an id outside the embedding: all requests would be lost.
        request = fit_request(request, self._check_running())
        self._check_sampling(request.sampling)
        deadline = time.monotonic() + self.config.request_timeout_s
        seen = await self._see(request)
        async with (
            self.adapters.held(request.adapter) as adapter,
            aclosing(self._admitted(request, seen, adapter, deadline)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def _admitted(
        self, request: GenerateRequest, seen: Sequence[SeenImage], adapter: str | None, deadline: float
    ) -> AsyncGenerator[Chunk]:
        """The answer, sent as soon as the server takes requests."""
        while True:
            if self.weights.asleep:
                yield Chunk(finish_reason="abort")
                return
            pauses = await self.weights.admission.wait(deadline)
            stream = self._send(request, seen, adapter)
            if request.whole:
                stream.hold_first()
            if not self.weights.verified:
                stream.hold()
            self.streams.add(stream)
            try:
                async with aclosing(stream.chunks(deadline - time.monotonic())) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except NotAdmitted:  # some servers refuse what arrives during a pause; it waits here like the others
                if pauses == self.weights.admission.closings:
                    raise
            finally:
                self.streams.discard(stream)
                await stream.close()

    async def _load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self.server.send("POST", self.adapter_routes[0], body)
        except EngineError as error:  # of whatever status: what this server cannot read, no other can
            raise EngineError(f"adapter {folder}: {error}", retryable=not await self.healthy()) from error

    async def _unload_adapter(self, name: str) -> None:
        await self.server.send("POST", self.adapter_routes[1], {"lora_name": name})

    def _check_running(self) -> EngineInfo:
        if self.info is None or not self.server.alive:
            raise EngineError(f"{self.server.name} is not running: it {self.server.end_of_it or 'was not started'}")
        return self.info
