"""The stock vLLM server as an engine: its routes, bodies and reservations."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.rollout_server.engines.checkpoint import check_complete
from penstock.rollout_server.engines.stock_engine import StockEngine
from penstock.rollout_server.engines.stock_weights import StockWeights
from penstock.rollout_server.engines.vllm_plugin import REFUSED
from penstock.rollout_server.engines.vllm_server import MODEL_NAME, VLLMServer
from penstock.rollout_server.engines.vllm_stream import TokenStream
from penstock.rollout_server.protocol import BadRequest, EngineError, GenerateRequest, Sampling
from penstock.weight_sync import WeightsRefused

MAX_TEMPERATURE = 2.0
READ_POLL_S = 0.01
PAUSES = {
    "keep": "mode=keep&clear_cache=false",
    "recompute": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
"""rollout.pause → vLLM's words."""


class VLLMWeights(StockWeights[Mapping[str, Any]]):
    """By our weight-transfer engine in vLLM's workers (`vllm_weights`), which is told of manifests."""

    version_path = "/weight_info"
    _world_size = 1

    async def _look(self) -> list[str]:
        await self.server.call("POST", "/update_weight_version", {"new_version": "0"})
        self._world_size = int((await self.server.call("GET", "/get_world_size"))["world_size"])
        return []

    @asynccontextmanager
    async def _fetch(self, manifest: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        """The workers read and verify in the background: what is left of it later would lengthen the pause."""
        check_complete(manifest, self.shapes)
        report = Path(tempfile.mkdtemp(prefix="read-", dir=self.server.folder))
        await self.server.call("POST", "/start_weight_update")
        try:
            await self._tell({**manifest, "report": str(report)}, "fetch")
            await self._until_read(report)
        except WeightsRefused:
            await self.server.call("POST", "/finish_weight_update")  # ends the session, without a label
            raise
        finally:
            shutil.rmtree(report, ignore_errors=True)
        yield manifest

    async def _until_read(self, report: Path) -> None:
        """Every worker has said how its reading ended. Raises `WeightsRefused` with what the first one says."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while len(said := _said(report)) < self._world_size:
            if not self.server.alive or time.monotonic() > deadline:
                raise EngineError(f"vLLM's workers did not read the weights; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)
        if refusal := next(filter(None, said), None):
            raise WeightsRefused(refusal)

    async def _pause(self) -> None:
        await self.server.call("POST", f"/pause?{PAUSES[self.config.pause]}")  # returns when vLLM is idle

    async def _load(self, version: int, fetched: Mapping[str, Any]) -> None:
        try:
            await self._tell(fetched, "load")
        except EngineError as error:
            # Of several ranks one may have refused what the others loaded: then the server must end.
            _, refused, reason = str(error).partition(REFUSED)
            if refused and self._world_size == 1:
                raise WeightsRefused(reason) from error
            raise
        await self.server.call("POST", "/finish_weight_update", {"weight_version": str(version)})

    async def _verify(self, fetched: Mapping[str, Any]) -> None:
        """The workers loaded verified bytes by vLLM's own layer-wise reload, which fails where one is left over."""

    async def _resume(self) -> None:
        await self.server.call("POST", "/resume")

    async def _tell(self, manifest: Mapping[str, Any], phase: str) -> None:
        await self.server.call("POST", "/update_weights", {"update_info": {**manifest, "phase": phase}})


def _said(report: Path) -> list[str]:
    """See `vllm_weights.FileUpdateInfo.report`."""
    return [file.read_text() for file in report.glob("[0-9]*")]


class VLLMEngine(StockEngine):
    """Implements `protocol.Engine`."""

    server_class = VLLMServer
    weights_class = VLLMWeights
    health_path = "/health"
    routes = (
        TokenStream.path,
        "/pause",
        "/resume",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_info",
        "/get_world_size",
    )

    async def _try_out(self) -> list[str]:
        body = self._body(GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))) | {"stream": False}
        choice = (await self.server.call("POST", TokenStream.path, body))["choices"][0]
        if not (choice.get("logprobs") or {}).get("content"):
            raise EngineError("vLLM returns no logprobs from its token endpoint", retryable=False)
        limits = [f"temperatures above {MAX_TEMPERATURE:g} are refused"]
        if choice.get("weight_versions") is None:
            limits.append("this vLLM does not report the version of each token: they are labelled on receipt, unproven")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.temperature > MAX_TEMPERATURE:
            raise BadRequest("sampling.temperature", f"vLLM takes {MAX_TEMPERATURE:g} at most")

    def _send(self, request: GenerateRequest) -> TokenStream:
        return TokenStream(self.server.http, self._body(request), lambda: self.weights.version)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "token_ids": request.token_ids,
            "sampling_params": sampling_params(request.sampling),
            "stream": True,
            "cache_salt": self.weights.cache_salt,
        }


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """vLLM's names. Only the caller's ids stop an answer."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,  # of the sampled token alone
    }
    return params if sampling.seed is None else params | {"seed": sampling.seed}
