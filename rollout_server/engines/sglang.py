"""The stock SGLang server as an engine: started as a child process, spoken to over its own HTTP API alone.

One weight swap, on a time line (all of it in `load_weights`; requests in flight go on, except with pause=abort):

    decoding ────────────────────┐ paused                                       ┌── decoding
    sidecar   read and verify    │ have it loaded · checksums · label · continue │
    SGLang                       │ read the file, copy into the layers           │
              └─ fetch_s ────────┘ └──── load_s ────┘                            │
                                 └─ pause_s ─────────────────────────────────────┘

New requests wait in `generate` meanwhile. Each carries the version as its cache salt, so that the prefix cache never
hands keys and values of older weights to a request that began under newer ones.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.answer_stream import version_of
from penstock.rollout_server.engines.checkpoint import check_complete, tensor_shapes, vocab_size
from penstock.rollout_server.engines.sglang_server import Installation, SGLangServer
from penstock.rollout_server.engines.sglang_stream import SGLangStream, logprobs_of, refusal
from penstock.rollout_server.engines.sglang_weights import (
    as_folder,
    expected_checksums,
    first_difference,
    folder_tensors,
)
from penstock.rollout_server.limits import BadRequest, fit_request
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    Sampling,
)

ROUTES = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/weights_checker",
    "/model_info",
    "/server_info",
)
PAUSES = {"keep": "in_place", "recompute": "retract", "abort": "abort"}
"""rollout.pause → SGLang's word."""


class SGLangEngine:
    """Implements `protocol.Engine`. One event loop owns it."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config = config
        self.model = model
        self._server = SGLangServer(config, model, log_dir, seed)
        self._version = 0
        self._loads = 0
        """Loads so far: a number that comes a second time with other weights must not find the first one's prefixes."""
        self._seeds = bool(config.sglang_args.get("enable_deterministic_inference"))
        self._checked: list[str] = []
        """SGLang's parameters whose checksums we can compute; none where they are of another kind."""
        self.info: EngineInfo | None = None
        self._shapes = tensor_shapes(model)
        self._streams: set[SGLangStream] = set()
        self._swap = asyncio.Lock()
        self._admitting = asyncio.Event()
        self._admitting.set()

    async def start(self) -> EngineInfo:
        """Start the server, check what it offers, sample one token. Raises `EngineError`."""
        vocabulary = await asyncio.to_thread(vocab_size, self.model)
        installation = await self._server.start()
        try:
            await self._check_routes(installation)
            await self._try_sampling()
            await self._try_checksums()
            self._version = await self._engine_version()
        except BaseException:
            await self._server.stop()
            raise
        self.info = EngineInfo(
            name="sglang",
            engine_version=installation.version,
            version=self._version,
            vocab_size=vocabulary,
            max_model_len=self.config.max_model_len,
            limits=self._limits(),
        )
        return self.info

    async def stop(self) -> None:
        """End the server and everything it started; open answers break off."""
        await self._server.stop()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Stream the answer. Raises `BadRequest` (ids outside the vocabulary, too many), `EngineError`."""
        request = fit_request(request, self._check_running())
        self._refuse_seed(request.sampling)
        deadline = time.monotonic() + self.config.request_timeout_s
        await self._until_admitting(deadline)
        stream = SGLangStream(self._server.http, self._body(request))
        self._streams.add(stream)
        try:
            async with aclosing(stream.chunks(deadline - time.monotonic())) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._streams.discard(stream)
            await stream.close()

    async def load_weights(self, manifest: Mapping[str, Any]) -> LoadReport:
        """Fetch, verify, pause, load, verify again, continue.

        `WeightsRefused`: nothing was touched, the old weights serve. `EngineError`: the server's state is unknown, so
        it was ended; the sidecar starts another.
        """
        async with self._swap:
            self._check_running()
            begin = time.monotonic()
            with as_folder(manifest, self._server.folder) as folder:
                expected = await asyncio.to_thread(self._read, manifest)
                fetched = time.monotonic()
                load_s, in_flight = await self._swap_paused(int(manifest["version"]), folder, expected)
            done = time.monotonic()
        return LoadReport(
            version=self._version, fetch_s=fetched - begin, pause_s=done - fetched, load_s=load_s, in_flight=in_flight
        )

    async def healthy(self) -> bool:
        """The process lives and its scheduler answers, paused or not."""
        if not self._server.alive:
            return False
        try:
            response = await self._server.http.get("/server_info", timeout=5)
        except (httpx.HTTPError, RuntimeError):  # the last: the client was closed by `stop`
            return False
        return response.status_code == httpx.codes.OK

    def stderr_tail(self) -> str:
        """The last lines of the server's log."""
        return self._server.tail()

    def _check_running(self) -> EngineInfo:
        if self.info is None or not self._server.alive:
            raise EngineError("SGLang is not running")
        return self.info

    # ---- starting

    async def _check_routes(self, installation: Installation) -> None:
        paths = (await self._request("GET", "/openapi.json")).get("paths", {})
        if missing := [route for route in ROUTES if route not in paths]:
            raise EngineError(
                f"SGLang {installation.version} does not offer {', '.join(missing)}; take one that does",
                retryable=False,
            )

    async def _try_sampling(self) -> None:
        """One token, with its logprob and its version. Raises `EngineError` where the server cannot do that."""
        request = GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))
        answer = await self._post("/generate", self._body(request) | {"stream": False})
        if not logprobs_of(answer):
            raise EngineError("SGLang sampled nothing", retryable=False)
        if "weight_versions" not in answer["meta_info"]:
            raise EngineError("SGLang does not report the version of each token; take a newer one", retryable=False)

    async def _try_checksums(self) -> None:
        """Are this server's checksums such that we can compute them? Asked of the weights that it came up with."""
        found = await self._checksums()
        tensors = await asyncio.to_thread(folder_tensors, self.model)
        expected = await asyncio.to_thread(expected_checksums, tensors, list(found), self.config.dtype)
        self._checked = sorted(expected) if first_difference(expected, found) is None else []

    def _limits(self) -> list[str]:
        limits = ["with top_k or top_p, logprobs are of the whole distribution at the temperature, before truncation"]
        if not self._seeds:
            limits.append("requests with a seed are refused: SGLang honours seeds with enable_deterministic_inference")
        if not self._checked:
            limits.append("weights are verified before loading only: this SGLang's checksums cannot be computed here")
        if not self._shapes:
            limits.append(f"{self.model} has no safetensors to compare with: incomplete versions are not detected")
        return limits

    # ---- sampling

    def _refuse_seed(self, sampling: Sampling) -> None:
        if sampling.seed is not None and not self._seeds:
            raise BadRequest("sampling.seed", "this SGLang honours no seeds; see enable_deterministic_inference")

    async def _until_admitting(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._admitting.wait(), deadline - time.monotonic())
        except TimeoutError as error:
            raise EngineError("the weight swap did not end before the request's deadline") from error

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_params(request.sampling)
        if self._seeds:  # without one SGLang takes the same for all, and a group of answers would be one answer
            params["sampling_seed"] = _seed(request.sampling)
        return {
            "rid": uuid.uuid4().hex,  # SGLang aborts by prefix: all have one length
            "input_ids": request.token_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "cache_salt": f"v{self._version}-{self._loads}",
        }

    # ---- weights

    def _read(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Verify every byte, name and shape; the checksums that SGLang must tell after loading them."""
        from penstock.rollout_server.weights import read_verified

        tensors = read_verified(manifest)
        check_complete(manifest, self._shapes)
        return expected_checksums(tensors, self._checked, self.config.dtype)

    async def _swap_paused(self, version: int, folder: Path, expected: Mapping[str, str]) -> tuple[float, int]:
        """(seconds of loading, requests that were frozen and go on). Any failure ends the server."""
        self._admitting.clear()
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                return await self._pause_and_load(version, folder, expected)
        except TimeoutError as error:
            await self._server.stop()
            raise EngineError(f"the weight swap took more than {self.config.start_timeout_s} s") from error
        except BaseException:
            await self._server.stop()  # half a version may be loaded: it must not sample
            raise
        finally:
            self._admitting.set()

    async def _pause_and_load(self, version: int, folder: Path, expected: Mapping[str, str]) -> tuple[float, int]:
        await self._post("/pause_generation", {"mode": PAUSES[self.config.pause]})
        in_flight = sum(not stream.ended for stream in self._streams)
        begin = time.monotonic()
        await self._post("/update_weights_from_disk", self._update(version, folder))
        load_s = time.monotonic() - begin
        await self._check_loaded(version, expected)
        self._version = version
        self._loads += 1
        # Its default empties the cache of a GPU, and fails where there is none.
        await self._post("/continue_generation", {"torch_empty_cache": False})
        return load_s, in_flight

    def _update(self, version: int, folder: Path) -> dict[str, Any]:
        return {
            "model_path": str(folder),
            "weight_version": str(version),
            "abort_all_requests": False,
            # With requests frozen in place it would be refused, and the update with it; the salts do its work.
            "flush_cache": self.config.pause != "keep",
        }

    async def _check_loaded(self, version: int, expected: Mapping[str, str]) -> None:
        if (reported := await self._engine_version()) != version:
            raise EngineError(f"SGLang reports version {reported} after loading {version}")
        if expected and (name := first_difference(expected, await self._checksums())):
            raise EngineError(f"SGLang holds other values than version {version} has in {name}")

    async def _checksums(self) -> dict[str, str]:
        """Of each parameter; empty where ranks hold different parts of them."""
        answer = await self._post("/weights_checker", {"action": "checksum"})
        ranks = answer.get("ranks") or []
        return dict(ranks[0]["checksums"]) if len(ranks) == 1 else {}

    async def _engine_version(self) -> int:
        return version_of((await self._request("GET", "/model_info"))["weight_version"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        timeout_s = self.config.start_timeout_s
        try:
            response = await self._server.http.request(method, path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, RuntimeError) as error:  # the last: the client was closed by `stop`
            raise EngineError(
                f"SGLang does not answer {path}: {error!r}; its log ends with:\n{self.stderr_tail()}"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.content)
        answer: dict[str, Any] = response.json()
        return answer


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names. Not `ignore_eos`: it would ignore the caller's ids too (see `sglang_model`)."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def _seed(sampling: Sampling) -> int:
    return secrets.randbits(31) if sampling.seed is None else sampling.seed
