"""The vLLM engine: its token stream and its routes. `server` starts the process, `weights` swaps weights.

Tokens are labelled with the engine's version when they are received. That is exact because versions change only while
the engine is paused and idle, and only after every token sampled before the pause was received (`http/weights`);
vLLM's own spans arrive with the last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from penstock.rollout_server.engines.checkpoint import fetch_model, has_vision_tower
from penstock.rollout_server.engines.http.drafts import Sampled, Scored, draft_method
from penstock.rollout_server.engines.http.engine import HttpEngine
from penstock.rollout_server.engines.http.stream import AnswerEvent, AnswerStream, RoutedAnswer
from penstock.rollout_server.engines.vllm.image_reader import ImageReader
from penstock.rollout_server.engines.vllm.images import SEEN_KINDS, difference, features, image_token_of, places_of
from penstock.rollout_server.engines.vllm.server import MODEL_NAME, VLLMServer
from penstock.rollout_server.engines.vllm.weights import VLLMWeights
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import (
    BadRequest,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Sampling,
)
from penstock.rollout_server.routed_experts import decode_rows
from penstock.weight_sync import GLOO, NCCL, Offer

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
MAX_TEMPERATURE = 2.0
PLAIN = "behind drafts vLLM reports logprobs of the whole distribution at temperature 1"


class VLLMStream(AnswerStream):
    """One answer of vLLM."""

    engine = "vLLM"
    path = "/inference/v1/generate"
    _fed: tuple[Sequence[int], Sequence[tuple[int, int]]] | None = None
    """Ids and places of images that were sent and not yet found in the answer."""

    def prove(self, ids: Sequence[int], places: Sequence[tuple[int, int]]) -> None:
        """The answer has to say that it was computed on these ids, with images in these places; called before anything
        is received."""
        self._fed = ids, places

    def _receive(self, events: Iterable[AnswerEvent]) -> None:
        """Tokens are added together: adding those of each event would cost more than reading them."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        last: AnswerEvent | None = None
        try:
            for event in events:
                # Before the first tokens.
                fed, self._fed = self._fed, None
                if fed is not None and (differs := difference(event, *fed)):
                    raise EngineError(
                        f"images: vLLM did not take the request as it was sent: {differs}", retryable=False
                    )
                for choice in event["choices"]:
                    ids, content = choice["token_ids"] or (), (choice["logprobs"] or {}).get("content") or ()
                    if len(ids) != len(content):
                        raise EngineError(f"vLLM sent {len(ids)} tokens with {len(content)} logprobs")
                    logprobs += [entry["logprob"] for entry in content]
                    token_ids += ids
                    last = choice if choice["finish_reason"] is not None else last
        finally:
            self._add(token_ids, logprobs[: len(token_ids)], self._label)
        if last is not None:
            if last["finish_reason"] not in _FINISH:
                raise EngineError(f"vLLM ended the answer with {last['finish_reason']!r}")
            self._end(_FINISH[last["finish_reason"]], last.get("weight_versions"), last.get("routed_experts"))

    def _rows(self, encoded: str) -> NDArray[Any]:
        """Base64 of a ``.npy`` file."""
        rows = decode_rows([encoded])
        assert rows is not None
        return rows


class VLLMEngine(HttpEngine):
    """Implements `protocol.Engine`."""

    server_class = VLLMServer
    weights_class = VLLMWeights
    weights: VLLMWeights
    health_path = "/health"
    routes = (
        VLLMStream.path,
        "/pause",
        "/resume",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_info",
        "/get_world_size",
    )
    sleep_routes = ("/sleep", "/wake_up")
    adapter_routes = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    server: VLLMServer
    images: ImageReader | None = None
    """Reader of images, if the model takes them."""
    _image_token = -1

    async def start(self) -> EngineInfo:
        self.model = str(await asyncio.to_thread(fetch_model, self.model))
        token = await asyncio.to_thread(image_token_of, Path(self.model))
        if token is not None:
            self._image_token, self.server.sees_images = token, True
            self.images = ImageReader(self.config, self.model, self.server.log_path.parent)
            await self.images.start()
        try:
            return await super().start()
        except BaseException:
            await self._stop_images()
            raise

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._stop_images()

    async def _stop_images(self) -> None:
        if self.images is not None:
            await self.images.stop()

    async def healthy(self) -> bool:
        """See `HttpEngine.healthy`; so does what reads images."""
        return await super().healthy() and (self.images is None or self.images.is_linked)

    @property
    def _drafts(self) -> bool:
        return bool(draft_method(self.config.vllm_args))

    @property
    def sees_images(self) -> bool:
        return self.images is not None

    async def _see(self, request: GenerateRequest) -> Sequence[SeenImage]:
        if self.images is None or not request.images:
            return ()
        timeout_s = self.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.images.read(request.images)
        except TimeoutError as error:
            raise EngineError(f"the request's images were not read in {timeout_s:g} s") from error

    @property
    def weight_workers(self) -> int:
        """See `StagingEngine`: one receives for all of them, which are on one machine; in place each for itself."""
        return self.weights.world_size if self.config.receives_in_place else 1

    @property
    def weight_wires(self) -> tuple[str, ...]:
        nccl = self.server.installation.nccl if self.server.installation else ""
        return (f"{NCCL}{nccl}", GLOO) if nccl and self.config.weight_transport == "nccl" else (GLOO,)

    async def stage_weights(self, offer: Offer) -> str:
        self._check_running()
        return await self.weights.stage(offer)

    @property
    def stands_still(self) -> bool:
        return self.weights.standstill is not None

    async def receive_weights(self, offer: Offer) -> str:
        self._check_running()
        return await self.weights.receive(offer)

    async def _answer(self, token_ids: list[int], count: int, **params: Any) -> dict[str, Any]:
        """A finished answer of `count` tokens, with further sampling parameters."""
        body = self._body(GenerateRequest(token_ids=token_ids, sampling=Sampling(max_new_tokens=count)))
        body |= {"stream": False, "sampling_params": body["sampling_params"] | params}
        return await self.server.call("POST", VLLMStream.path, body)

    async def _sample(self, token_ids: list[int], count: int) -> Sampled:
        (choice,) = (await self._answer(token_ids, count))["choices"]
        return Sampled(choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]])

    async def _score(self, token_ids: list[int]) -> list[Scored]:
        rows = (await self._answer(token_ids, 1, prompt_logprobs=1))["prompt_logprobs"]
        scored = []
        for token, row in zip(token_ids[1:], rows[1:], strict=True):
            likeliest = max(row, key=lambda one: row[one]["logprob"])
            scored.append(Scored(row[str(token)]["logprob"], int(likeliest), row[likeliest]["logprob"]))
        return scored

    async def _try_out(self) -> list[str]:
        choice = (await self._answer([0], 1))["choices"][0]
        if not (choice.get("logprobs") or {}).get("content"):
            raise EngineError("vLLM returns no logprobs from its token endpoint", retryable=False)
        limits = [f"temperatures above {MAX_TEMPERATURE:g} are refused"]
        if self.images is None and await asyncio.to_thread(has_vision_tower, self.model):
            limits.append(f"images are refused: vLLM is given those of models of type {' and '.join(SEEN_KINDS)}")
        if self._drafts:
            limits.append(f"temperatures other than 0 and 1, top_k and top_p are refused: {PLAIN}")
        if choice.get("weight_versions") is None:
            limits.append("this vLLM does not report the version of each token: they are labelled on receipt, unproven")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.temperature > MAX_TEMPERATURE:
            raise BadRequest("sampling.temperature", f"vLLM takes {MAX_TEMPERATURE:g} at most")
        if self._drafts and (sampling.temperature not in (0.0, 1.0) or sampling.top_k > 0 or sampling.top_p < 1.0):
            raise BadRequest("sampling", f"{PLAIN}: set temperature 1 without top_k and top_p")

    def _send(self, request: GenerateRequest, seen: Sequence[SeenImage], adapter: str | None) -> VLLMStream:
        routed = RoutedAnswer.of(request, self.layers)
        places = places_of(request.token_ids, self._image_token, seen) if seen else []
        body = self._body(request)
        if adapter is not None:
            body["model"] = adapter
        if seen:
            body |= {"features": features(seen, places, self.weights.cache_salt), "return_token_ids": True}
        stream = VLLMStream(self.server.events, body, self.weights.version, routed)
        if seen:
            stream.prove(request.token_ids, places)
        return stream

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_params(request.sampling)
        if self.layers is not None:  # it sends all rows unless a start is named
            start = request.routed_experts_from
            params["routed_experts_prompt_start"] = len(request.token_ids) - 1 if start is None else start
        return {
            "model": MODEL_NAME,
            "token_ids": request.token_ids,
            "sampling_params": params,
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
