"""The `hf` engine: a transformers model under a batcher of ours, in a child process, no GPU needed.

HFEngine.generate ── queue per request ◄── Link ◄── socket pair ◄── process `server`

`Link` is the connection: JSON lines both ways (`server` lists them).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import fetch_model, layers_with_experts, start_deadline_s
from penstock.rollout_server.engines.child_link import Link, child_environment, end_child
from penstock.rollout_server.engines.http.server_process import Child
from penstock.rollout_server.pictures import read_images
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
LOAD_S = 300.0
STAGE_S = 30.0
"""Beside a broadcast's own deadline."""
LAST_WORDS_S = 1.0
"""From the end of the connection to the end of the process."""


class HFEngine:
    """See `Engine`."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config, self.model, self.seed = config, model, seed
        self.child = Child("hf", Path(log_dir) / "engine-hf.log")
        self.info: EngineInfo | None = None
        self._link: Link | None = None
        self._one_load_at_a_time = asyncio.Lock()
        self.stands_still = False
        """See `InPlaceEngine`."""

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """The engine's process, for a supervisor that wants to see it die."""
        return self.child.process

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        return self.child.alive and self._link is not None and self._link.is_open

    async def start(self) -> EngineInfo:
        """Start the process; ready once it has sampled a token. Raises `EngineError` with the end of its log."""
        folder = await asyncio.to_thread(fetch_model, self.model)
        if self.config.routing_replay:
            layers_with_experts(str(folder))
        start_s = start_deadline_s(self.config.start_timeout_s, folder)
        try:
            async with asyncio.timeout(start_s):
                self._link = Link(self._reap, self._cause, "the hf engine")
                await self._spawn(self._link)
                self.info = await self._link.ready()
                async for _ in self.generate(GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))):
                    pass
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"the hf engine was not up in {start_s:g} s (rollout.start_timeout_s)") from error
        except BaseException:
            await self.stop()
            raise
        return self.info

    async def _spawn(self, link: Link) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "penstock.rollout_server.engines.hf.server", "--fd", str(theirs.fileno())]
        command += ["--model", self.model, "--config", self.config.model_dump_json(), "--seed", str(self.seed)]
        with theirs:
            await self.child.spawn(command, child_environment(self.config.threads), pass_fds=[theirs.fileno()])
        await link.open(ours)

    async def stop(self) -> None:
        """End the process: its connection first, a kill after `child_link.STOP_S`."""
        await end_child(self.child.process, self._link)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`. Raises `BadRequest`, `EngineError`."""
        if self.info is None or self._link is None:
            raise EngineError("the hf engine is not started")
        request = fit_request(request, self.info)
        if request.images:  # refused here, not by a failure in the engine
            await asyncio.to_thread(read_images, request.images)
        images = [image.model_dump() for image in request.images]
        name, answer = self._link.stream()
        sampling = request.sampling.model_dump()
        try:
            asked = {"token_ids": request.token_ids, "routed_from": request.routed_experts_from}
            self._link.send("generate", id=name, sampling=sampling, images=images, **asked)
            while True:
                chunk = await self._next(answer)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            if self._link.forget(name) and self.alive:
                self._link.send("abort", id=name)

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
            reply = await self._call("load", LOAD_S, manifest=manifest.as_dict())
            if "lost" in reply:
                raise WeightsUnreachable(reply["lost"])
            if reply["refused"] is not None:
                raise WeightsRefused(reply["refused"])
            self.stands_still = False
        return LoadReport(**reply["report"])

    @property
    def weight_workers(self) -> int:
        """See `StagingEngine`: one process has the model."""
        return 1

    @property
    def weight_wires(self) -> tuple[str, ...]:
        """See `StagingEngine`."""
        return (GLOO,)

    async def stage_weights(self, offer: Offer) -> str:
        """See `StagingEngine`."""
        reply = await self._call("stage", offer.deadline_s + STAGE_S, offer=offer.as_dict())
        if "lost" in reply:
            raise WeightsUnreachable(reply["lost"])
        return str(reply["state"])

    async def receive_weights(self, offer: Offer) -> str:
        """See `InPlaceEngine`."""
        async with self._one_load_at_a_time:
            before, self.stands_still = self.stands_still, True  # also where no reply comes
            reply = await self._call("receive", offer.deadline_s + STAGE_S, offer=offer.as_dict())
            if "broken" in reply:
                raise WeightsBroken(reply["broken"])
            if "state" in reply:
                return str(reply["state"])
            self.stands_still = before
        if "refused" in reply:
            raise WeightsRefused(reply["refused"])
        raise WeightsUnreachable(reply["lost"])

    def will_sleep(self, level: SleepLevel) -> None:
        """See `SleepingEngine`: any of these processes can."""

    async def device_bytes(self) -> DeviceBytes:
        """See `SleepingEngine`."""
        figures = await self.ping()
        return DeviceBytes(figures["used_bytes"], figures["most_bytes"])

    async def sleep(self, level: SleepLevel) -> None:
        """See `SleepingEngine`."""
        async with self._one_load_at_a_time:
            await self._call("sleep", LOAD_S, level=level)

    async def wake(self) -> None:
        """See `SleepingEngine`."""
        await self._call("wake", LOAD_S)

    async def healthy(self) -> bool:
        """The process lives and its event loop answers within `PING_S`."""
        try:
            await self.ping()
        except EngineError:
            return False
        return True

    async def ping(self) -> dict[str, Any]:
        """The engine's own figures: steps, in_flight, kv_blocks, reused_tokens, version. Raises `EngineError`."""
        return await self._call("ping", PING_S)

    def stderr_tail(self) -> str:
        """The last lines of the engine's log, and how it ended."""
        return self.child.tail()

    async def _call(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        if self._link is None:
            raise EngineError("the hf engine is not started")
        return await self._link.call(op, timeout_s, **fields)

    async def _reap(self) -> None:
        process = self.child.process
        if process is not None:
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=LAST_WORDS_S)

    def _cause(self) -> str:
        tail = self.stderr_tail()
        return "the hf engine is gone" + (f"; the end of {self.child.log_path}:\n{tail}" if tail else "")
