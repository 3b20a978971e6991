"""The stock vLLM server as an engine: started as a child process, spoken to over its own HTTP API alone.

One weight swap, on a time line (all of it in `load_weights`; requests in flight go on):

    decoding ───────────────────────────────┐ paused                               ┌── decoding
    sidecar     read and verify the file    │ load · label · settle · check label  │
    worker      read and verify the file    │ copy into the layers                 │
                └─ fetch_s ─────────────────┘ └─ load_s ─┘                         │
                                            └─ pause_s ────────────────────────────┘

New requests wait in `generate` meanwhile. Each carries the version as its cache salt, so that the prefix cache never
hands keys and values of older weights to a request that began under newer ones; nothing has to be flushed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.answer_stream import version_of
from penstock.rollout_server.engines.checkpoint import check_complete, tensor_shapes, vocab_size
from penstock.rollout_server.engines.vllm_plugin import REFUSED
from penstock.rollout_server.engines.vllm_server import MODEL_NAME, Installation, VLLMServer
from penstock.rollout_server.engines.vllm_stream import TokenStream, refusal
from penstock.rollout_server.limits import fit_request
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    Sampling,
    WeightsRefused,
)

ROUTES = (
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/get_world_size",
)
QUIET_TURNS = 10
"""Turns of the event loop, each of which polls every socket, without a token: then none is on its way."""


class VLLMEngine:
    """Implements `protocol.Engine`. One event loop owns it."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config = config
        self.model = model
        self._server = VLLMServer(config, model, log_dir, seed)
        self._version = 0
        self._loads = 0
        """Loads so far: a number that comes a second time with other weights must not find the first one's prefixes."""
        self._world_size = 1
        self.info: EngineInfo | None = None
        self._shapes = tensor_shapes(model)
        self._streams: set[TokenStream] = set()
        self._swap = asyncio.Lock()
        self._admitting = asyncio.Event()
        self._admitting.set()

    async def start(self) -> EngineInfo:
        """Start the server, check what it offers, sample one token. Raises `EngineError`."""
        vocabulary = await asyncio.to_thread(vocab_size, self.model)
        installation = await self._server.start()
        try:
            await self._check_routes(installation)
            await self._post("/update_weight_version", {"new_version": "0"})
            self._version = await self._engine_version()
            self._world_size = int((await self._request("GET", "/get_world_size"))["world_size"])
            limits = await self._try_sampling()
        except BaseException:
            await self._server.stop()
            raise
        self.info = EngineInfo(
            name="vllm",
            engine_version=installation.version,
            version=self._version,
            vocab_size=vocabulary,
            max_model_len=self.config.max_model_len,
            limits=limits,
        )
        return self.info

    async def stop(self) -> None:
        """End the server and everything it started; open answers break off."""
        await self._server.stop()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream the answer. Raises `BadRequest` (ids outside the vocabulary, too many), `EngineError`."""
        if self.info is None or not self._server.alive:
            raise EngineError("vLLM is not running")
        # vLLM's core dies of an id outside the embedding where no tokenizer guards it: all requests would be lost.
        request = fit_request(request, self.info)
        deadline = time.monotonic() + self.config.request_timeout_s
        await self._until_admitting(deadline)
        stream = TokenStream(self._server.http, self._body(request), lambda: self._version)
        self._streams.add(stream)
        try:
            async with aclosing(stream.chunks(deadline - time.monotonic())) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._streams.discard(stream)
            await stream.close()

    async def load_weights(self, manifest: Mapping[str, Any]) -> LoadReport:
        """Fetch, verify, pause, load, label, resume.

        `WeightsRefused`: nothing was touched, the old weights serve. `EngineError`: the server's state is unknown, so
        it was ended; the sidecar starts another.
        """
        async with self._swap:
            begin = time.monotonic()
            await self._fetch(manifest)
            fetched = time.monotonic()
            load_s, in_flight = await self._swap_paused(manifest)
            done = time.monotonic()
        return LoadReport(
            version=self._version, fetch_s=fetched - begin, pause_s=done - fetched, load_s=load_s, in_flight=in_flight
        )

    async def healthy(self) -> bool:
        """The process lives and its engine core answers."""
        if not self._server.alive:
            return False
        try:
            response = await self._server.http.get("/health", timeout=5)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    def stderr_tail(self) -> str:
        """The last lines of the server's log."""
        return self._server.tail()

    # ---- starting

    async def _check_routes(self, installation: Installation) -> None:
        response = await self._server.http.get("/openapi.json")
        paths = response.json().get("paths", {})
        if missing := [route for route in ROUTES if route not in paths]:
            raise EngineError(
                f"vLLM {installation.version} does not offer {', '.join(missing)}; take one that does", retryable=False
            )

    async def _try_sampling(self) -> list[str]:
        """What one sampled token shows that this server cannot do. Raises `EngineError` where it cannot sample."""
        sampling = Sampling(max_new_tokens=1)
        body = self._body(GenerateRequest(token_ids=[0], sampling=sampling)) | {"stream": False}
        choice = (await self._post("/inference/v1/generate", body))["choices"][0]
        if not (choice.get("logprobs") or {}).get("content"):
            raise EngineError("vLLM returns no logprobs from its token endpoint", retryable=False)
        limits = ["temperatures above 2 are refused"]
        if choice.get("weight_versions") is None:
            limits.append("this vLLM does not report the version of each token: they are labelled on receipt, unproven")
        if not self._shapes:
            limits.append(f"{self.model} has no safetensors to compare with: incomplete versions are not detected")
        return limits

    # ---- sampling

    async def _until_admitting(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._admitting.wait(), deadline - time.monotonic())
        except TimeoutError as error:
            raise EngineError("the weight swap did not end before the request's deadline") from error

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "token_ids": request.token_ids,
            "sampling_params": sampling_params(request.sampling),
            "stream": True,
            "cache_salt": f"v{self._version}-{self._loads}",
        }

    # ---- weights

    async def _fetch(self, manifest: Mapping[str, Any]) -> None:
        """The workers read and verify in the background while we do; decoding goes on."""
        from penstock.rollout_server.weights import verify_files

        try:
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {**manifest, "phase": "fetch"}})
            await asyncio.to_thread(verify_files, manifest)
            check_complete(manifest, self._shapes)
        except WeightsRefused:
            await self._post("/finish_weight_update")  # ends the session, without a label
            raise

    async def _swap_paused(self, manifest: Mapping[str, Any]) -> tuple[float, int]:
        """(seconds of loading, requests that were frozen and go on). Any failure but a refusal ends the server."""
        self._admitting.clear()
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                return await self._pause_and_load(manifest)
        except TimeoutError as error:
            await self._server.stop()
            raise EngineError(f"the weight swap took more than {self.config.start_timeout_s} s") from error
        except (EngineError, asyncio.CancelledError):
            await self._server.stop()  # half a version may be loaded: it must not sample
            raise
        finally:
            self._admitting.set()

    async def _pause_and_load(self, manifest: Mapping[str, Any]) -> tuple[float, int]:
        clear_cache = "true" if self.config.pause == "recompute" else "false"
        await self._post(f"/pause?mode=keep&clear_cache={clear_cache}")  # returns when the engine is idle
        in_flight = sum(not stream.ended for stream in self._streams)
        try:
            load_s = await self._load(manifest)
        except WeightsRefused:
            await self._post("/resume")
            raise
        await self._post("/resume")
        return load_s, in_flight

    async def _load(self, manifest: Mapping[str, Any]) -> float:
        """Seconds until the engine holds `manifest`'s version and says so; tokens received from now on are of it."""
        version = int(manifest["version"])
        begin = time.monotonic()
        try:
            await self._post("/update_weights", {"update_info": {**manifest, "phase": "load"}})
        except EngineError as error:
            self._raise_if_refused(error)
            raise
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        load_s = time.monotonic() - begin
        if (reported := await self._engine_version()) != version:
            raise EngineError(f"vLLM reports version {reported} after loading {version}")
        await self._settle()
        self._version = version
        self._loads += 1
        return load_s

    def _raise_if_refused(self, error: EngineError) -> None:
        # Of several ranks one may have refused what the others loaded: then the server must end.
        _, refused, reason = str(error).partition(REFUSED)
        if refused and self._world_size == 1:
            raise WeightsRefused(reason) from error

    async def _settle(self) -> None:
        """Receive everything that was sampled before the pause.

        The engine is idle and the server has answered several calls since, each behind its tokens in the same queues;
        what is left is in our sockets, and each turn of the loop reads those.
        """
        quiet_turns, received = 0, -1
        while quiet_turns < QUIET_TURNS:
            await asyncio.sleep(0)
            now = sum(stream.received for stream in self._streams)
            quiet_turns = quiet_turns + 1 if now == received else 0
            received = now

    async def _engine_version(self) -> int:
        response = await self._request("GET", "/weight_info")
        return version_of(response["weight_version"])

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # A connection for each call: vLLM closes the one on which a call failed, and the next call must not meet that.
        headers = {"Connection": "close"}
        timeout_s = self.config.start_timeout_s
        try:
            response = await self._server.http.request(method, path, json=body, headers=headers, timeout=timeout_s)
        except (httpx.HTTPError, RuntimeError) as error:  # the last: the client was closed by `stop`
            raise EngineError(
                f"vLLM does not answer {path}: {error!r}; its log ends with:\n{self.stderr_tail()}"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.content)
        answer: dict[str, Any] = response.json()
        return answer


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
