"""The `hf` engine: a transformers model under a batcher of ours, in a child process, no GPU needed.

HFEngine.generate ── queue per request ◄── Link ◄── socket pair ◄── process `server`

`Link` is the connection: JSON lines both ways (`server` lists them).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.adapters import AdapterSlots
from penstock.rollout_server.engines.checkpoint import fetch_model, layers_with_experts, start_deadline_s
from penstock.rollout_server.engines.child_link import Link, LinkedChild
from penstock.rollout_server.pictures import read_images
from penstock.rollout_server.protocol import (
    BadRequest,
    Chunk,
    DeviceBytes,
    EngineError,
    EngineInfo,
    GenerateRequest,
    Sampling,
    SleepLevel,
    fit_request,
)
from penstock.weight_sync import (
    GLOO,
    LoadReport,
    Manifest,
    Offer,
    WeightsBroken,
    WeightsRefused,
    WeightsUnreachable,
)

PING_S = 10.0
STAGE_S = 30.0
"""Seconds in addition to the broadcast's own deadline."""


class HFEngine:
    """See `Engine`."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config, self.model, self.seed = config, model, seed
        self.child = LinkedChild("hf", Path(log_dir) / "engine-hf.log", "the hf engine", config.threads)
        self.info: EngineInfo | None = None
        self._one_load_at_a_time = asyncio.Lock()
        self._adapters = AdapterSlots(self._load_adapter, self._unload_adapter, config.request_timeout_s)
        self.stands_still = False
        """See `InPlaceEngine`."""
        self._timeout_s = config.start_timeout_s
        """Seconds that a start or a load may take; `start` adds the time of reading the weights."""

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """The engine's process, for a supervisor that wants to see it die."""
        return self.child.process

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        return self.child.is_linked

    async def start(self) -> EngineInfo:
        """Start the process; ready once it has sampled a token. Raises `EngineError` with the end of its log."""
        folder = await asyncio.to_thread(fetch_model, self.model)
        if self.config.routing_replay:
            layers_with_experts(str(folder))
        self._timeout_s = start_deadline_s(self.config.start_timeout_s, folder)
        try:
            async with asyncio.timeout(self._timeout_s):
                model = ["--model", self.model, "--seed", str(self.seed), "--config", self.config.model_dump_json()]
                link = await self.child.open("penstock.rollout_server.engines.hf.server", *model)
                self.info = await link.ready
                async for _ in self.generate(GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))):
                    pass
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"the hf engine was not up in {self._timeout_s:g} s (rollout.start_timeout_s)") from error
        except BaseException:
            await self.stop()
            raise
        return self.info

    async def stop(self) -> None:
        await self.child.stop()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`. Raises `BadRequest`, `EngineError`."""
        if self.info is None or (link := self.child.link) is None:
            raise EngineError("the hf engine is not started")
        request = fit_request(request, self.info)
        if request.images:  # refused here, not by a failure in the engine
            await asyncio.to_thread(read_images, request.images)
        async with (
            self._adapters.held(request.adapter) as adapter,
            aclosing(self._answer(link, request, adapter)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def _answer(self, link: Link, request: GenerateRequest, adapter: str | None) -> AsyncGenerator[Chunk]:
        images = [image.model_dump() for image in request.images]
        name, answer = link.stream()
        sampling = request.sampling.model_dump()
        try:
            context = {"token_ids": request.token_ids, "routed_from": request.routed_experts_from, "adapter": adapter}
            link.send("generate", id=name, sampling=sampling, images=images, **context)
            while True:
                chunk = await self._next(answer)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            if link.forget(name) and self.alive:
                link.send("abort", id=name)

    async def _load_adapter(self, name: str, folder: Path) -> None:
        reply = await self.child.call("adapter", self.config.request_timeout_s, name=name, folder=str(folder))
        if "bad" in reply:
            raise BadRequest("adapter", reply["bad"])

    async def _unload_adapter(self, name: str) -> None:
        await self.child.call("forget", self.config.request_timeout_s, name=name)

    async def _next(self, answer: asyncio.Queue[Chunk | EngineError]) -> Chunk:
        timeout_s = self.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                item = await answer.get()
        except TimeoutError as error:
            raise EngineError(f"the hf engine sampled no token for this request in {timeout_s:g} s") from error
        if isinstance(item, EngineError):
            raise item
        return item

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        """See `Engine.load_weights`; one at a time."""
        async with self._one_load_at_a_time:
            reply = _check_reply(await self.child.call("load", self._timeout_s, manifest=manifest.as_dict()))
            self.stands_still = False
        return LoadReport(**reply["report"])

    @property
    def weight_workers(self) -> int:
        """See `StagingEngine`: one process has the model."""
        return 1

    @property
    def weight_wires(self) -> tuple[str, ...]:
        return (GLOO,)

    async def stage_weights(self, offer: Offer) -> str:
        reply = await self.child.call("stage", offer.deadline_s + STAGE_S, offer=offer.as_dict())
        return str(_check_reply(reply)["state"])

    async def receive_weights(self, offer: Offer) -> str:
        async with self._one_load_at_a_time:
            before, self.stands_still = self.stands_still, True  # also where no reply comes
            reply = await self.child.call("receive", offer.deadline_s + STAGE_S, offer=offer.as_dict())
            if "refused" in reply or "lost" in reply:
                self.stands_still = before
            return str(_check_reply(reply)["state"])

    def will_sleep(self, level: SleepLevel) -> None:
        """See `SleepingEngine`: any of these processes can."""

    async def device_bytes(self) -> DeviceBytes:
        figures = await self.ping()
        return DeviceBytes(figures["used_bytes"], figures["most_bytes"])

    async def sleep(self, level: SleepLevel) -> None:
        async with self._one_load_at_a_time:
            await self.child.call("sleep", self._timeout_s, level=level)

    async def wake(self) -> None:
        await self.child.call("wake", self._timeout_s)

    async def healthy(self) -> bool:
        """The process lives and its event loop answers within `PING_S`."""
        try:
            await self.ping()
        except EngineError:
            return False
        return True

    async def ping(self) -> dict[str, Any]:
        """The engine's own figures: steps, in_flight, kv_blocks, reused_tokens, version. Raises `EngineError`."""
        return await self.child.call("ping", PING_S)

    def stderr_tail(self) -> str:
        """The last lines of the engine's log, and how it ended."""
        return self.child.tail()


def _check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply of a call that did its work. Raises `WeightsRefused`, `WeightsUnreachable`, `WeightsBroken`."""
    for key, kind in (("refused", WeightsRefused), ("lost", WeightsUnreachable), ("broken", WeightsBroken)):
        if key in reply:
            raise kind(reply[key])
    return reply
