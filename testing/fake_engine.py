"""An engine without a model, in this process: the next token is a hash of the context and the policy version.

Deterministic: a test can compute every server's answer, before and after a swap, whole or resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.protocol import (
    Chunk,
    DeviceBytes,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    SleepLevel,
    fit_request,
)
from penstock.rollout_server.routed_experts import encode_rows
from penstock.testing.fake_tokens import VOCAB, next_token
from penstock.weight_sync import ChainFile, LoadReport, Manifest, TensorEntry, WeightsRefused, state_of

FAKE_BYTES = 100
"""Device bytes of an engine that is awake."""


def fake_experts(token: int, version: int) -> NDArray[np.uint8]:
    """[2, 2] of 8 that read `token` in a fake engine at `version`."""
    first = xxhash.xxh3_64_intdigest(f"{version}:{token}".encode()) % 8
    return np.array([[first, (first + 1) % 8], [(first + 2) % 8, first]], dtype=np.uint8)


def fake_manifest(version: int, damaged: str = "", weights: str = "", file: str = __file__) -> dict[str, Any]:
    """The announcement of a version; `FakeEngine` refuses it if it names a `damaged` tensor.

    `weights`: the checksum of its tensor, by default one of the version's own. `file`: one that is there; no fake
    engine reads it.
    """
    tensors: tuple[TensorEntry, ...] = (TensorEntry("w", (1,), "float32", weights or f"{version:016x}"),)
    tensors += (TensorEntry(damaged, (1,), "float32", ""),) if damaged else ()
    chain = ChainFile(version, None, file, 4, "", state_of(tensors))
    return Manifest("shm", (chain,), tensors).as_dict()


class FakeEngine:
    """See `Engine`. One token per request and `token_s`; `crash` kills it as a signal would."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int, *, token_s: float = 0.0) -> None:
        self.config, self.token_s = config, token_s
        self.version = 0
        self.running = 0
        self.asked = 0
        """Requests so far."""
        self.sampled = 0
        """Tokens so far."""
        self.loaded: list[int] = []
        """Versions that were loaded, in order."""
        self.sleeps: list[int] = []
        """Levels, as they were asked for; the first is that of `will_sleep`."""
        self._asleep = False
        self._dead = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def start(self) -> EngineInfo:
        return EngineInfo(
            name="fake",
            engine_version="1",
            version=self.version,
            vocab_size=VOCAB,
            max_model_len=self.config.max_model_len,
            routed_experts=self.config.routing_replay,
        )

    async def stop(self) -> None:
        self.crash()

    def crash(self) -> None:
        """Every call fails from now on, those in progress included."""
        self._dead.set()
        self._resumed.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        info = await self.start()
        sampling = fit_request(request, info).sampling
        context = list(request.token_ids)
        # Without a start: beyond whatever there will be.
        start = request.routed_experts_from
        routed = self.config.max_model_len + 1 if start is None else start
        self.asked += 1
        self.running += 1
        try:
            for position in range(sampling.max_new_tokens):
                await asyncio.sleep(self.token_s)
                await self._resumed.wait()
                if self._asleep:
                    yield Chunk(finish_reason="abort")
                    return
                if self._dead.is_set():
                    raise EngineError("the fake engine crashed")
                token, logprob = next_token(context, self.version)
                rows = [fake_experts(context[n], self.version) for n in range(routed, len(context))]
                routed = max(routed, len(context))
                context.append(token)
                self.sampled += 1
                last = position + 1 == sampling.max_new_tokens
                reason: FinishReason | None = "length" if last else None
                reason = "stop" if token in sampling.stop_token_ids else reason
                yield Chunk(
                    token_ids=[token],
                    logprobs=[logprob],
                    version_spans=[(self.version, 0, 1)],
                    finish_reason=reason,
                    routed_experts=[encode_rows(np.stack(rows))] if rows else [],
                )
                if reason:
                    return
        finally:
            self.running -= 1

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        if self._dead.is_set():
            raise EngineError("the fake engine crashed")
        if damaged := next((entry.name for entry in manifest.tensors if not entry.xxh3), None):
            raise WeightsRefused(f"version {manifest.version}: tensor {damaged!r} is missing")
        started = time.perf_counter()
        self._resumed.clear()
        await asyncio.sleep(self.token_s)
        self.version = manifest.version
        self.loaded.append(self.version)
        self._resumed.set()
        pause_s = time.perf_counter() - started
        return LoadReport(version=self.version, fetch_s=0.0, pause_s=pause_s, load_s=pause_s, in_flight=self.running)

    def will_sleep(self, level: SleepLevel) -> None:
        self.sleeps.append(level)

    async def device_bytes(self) -> DeviceBytes:
        return DeviceBytes(0 if self._asleep else FAKE_BYTES, FAKE_BYTES)

    async def sleep(self, level: SleepLevel) -> None:
        if self._dead.is_set():
            raise EngineError("the fake engine crashed")
        self.sleeps.append(level)
        self._asleep = True

    async def wake(self) -> None:
        self._asleep = False

    async def healthy(self) -> bool:
        return not self._dead.is_set()

    def stderr_tail(self) -> str:
        return ""
