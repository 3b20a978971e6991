"""The SGLang engine: its token stream and its routes. `server` starts the process.

Each event has the tokens since the last one and the version that SGLang's front end had when it received them. The
scheduler sends tokens and the replies to control calls through two sockets, and the second may overtake the first:
tokens of the old version can get the new one's label, never the reverse. So tokens are certain while the label is the
version that the request was sent under; from the first newer one on they wait for the spans of the last event, which
the scheduler itself counts.

How weights reach it: `weights`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import uuid
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rollout_server.engines.checkpoint import has_vision_tower
from penstock.rollout_server.engines.http.drafts import Sampled, Scored
from penstock.rollout_server.engines.http.engine import HttpEngine
from penstock.rollout_server.engines.http.event_client import EventClient
from penstock.rollout_server.engines.http.stream import AnswerEvent, AnswerStream, RoutedAnswer, version_of
from penstock.rollout_server.engines.sglang.server import SGLangServer
from penstock.rollout_server.engines.sglang.weights import SGLangWeights
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import (
    BadRequest,
    EngineError,
    FinishReason,
    GenerateRequest,
    Sampling,
)
from penstock.weight_sync import GLOO, Offer

BLIND = (
    "images are refused: SGLang takes finished pixels as tensors of its Python API alone, and over HTTP makes its own"
    " of encoded images, by another processor than the trainer's"
)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangStream(AnswerStream):
    """One answer of SGLang, asked for under `version`.

    `body["rid"]` is its name there; none may be the beginning of another.
    """

    engine = "SGLang"
    path = "/generate"

    def __init__(
        self, events: EventClient, body: dict[str, Any], version: int, routed: RoutedAnswer | None = None
    ) -> None:
        super().__init__(events, body, version, routed)
        self._events = events
        self._version = version
        self._rid: str = body["rid"]

    async def close(self) -> None:
        """SGLang would notice the closed connection only two seconds later, and sample on until then."""
        self.read()
        if not self.ended:
            # A server that does not answer this is gone or hangs, which its supervisor finds out by itself.
            with contextlib.suppress(OSError):
                # The call that aborts an answer has 5 s.
                await self._events.call("/abort_request", json.dumps({"rid": self._rid}).encode(), 5.0)
        await super().close()

    def _receive(self, events: Iterable[AnswerEvent]) -> None:
        for event in events:
            meta = event["meta_info"]
            label = version_of(meta["weight_version"])
            self._add(event["output_ids"], logprobs_of(event), label, certain=label == self._version)
            if (reason := meta["finish_reason"]) is not None:
                self._finish(reason, meta)

    def _finish(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        status = reason.get("status_code")
        if reason["type"] not in _FINISH or status is not None:  # an abort with a status is the server's refusal
            raise EngineError(
                f"SGLang ended the answer with {reason['type']!r}: {reason.get('message')}",
                retryable=status is None or status >= 500,
            )
        if isinstance(reason.get("matched"), str):  # no stop string is ever sent; the last id was replaced by another
            raise EngineError(f"SGLang ended the answer by itself: {reason['matched']}")
        self._end(_FINISH[reason["type"]], meta.get("weight_versions"), meta.get("routed_experts"))

    def _rows(self, encoded: str) -> NDArray[Any]:
        """Base64 of int32 numbers, without their shape."""
        assert self._routed is not None
        layers = self._routed.layers
        return np.frombuffer(b64decode(encoded), dtype="<i4").reshape(-1, layers.all_layers, layers.mixtures.per_token)


def logprobs_of(event: dict[str, Any]) -> list[float]:
    """Logprobs of `output_ids`, in order. Raises `EngineError` if SGLang's pairs are of other tokens."""
    pairs = event["meta_info"].get("output_token_logprobs") or []
    if (ids := [pair[1] for pair in pairs]) != event["output_ids"]:
        raise EngineError(f"SGLang sent tokens {event['output_ids']} with logprobs of {ids}")
    return [pair[0] for pair in pairs]


class SGLangEngine(HttpEngine):
    """Implements `protocol.Engine`."""

    server_class = SGLangServer
    weights_class = SGLangWeights
    weights: SGLangWeights
    health_path = "/server_info"
    routes = (
        SGLangStream.path,
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/weights_checker",
        "/model_info",
        "/server_info",
    )
    sleep_routes = ("/release_memory_occupation", "/resume_memory_occupation")
    adapter_routes = ("/load_lora_adapter", "/unload_lora_adapter")

    @property
    def _seeds(self) -> bool:
        return bool(self.config.sglang_args.get("enable_deterministic_inference"))

    @property
    def weight_workers(self) -> int:
        """See `StagingEngine`: the sidecar receives, for all ranks."""
        return 1

    @property
    def weight_wires(self) -> tuple[str, ...]:
        """See `StagingEngine`: the sidecar has no GPU."""
        return (GLOO,)

    async def stage_weights(self, offer: Offer) -> str:
        self._check_running()
        return await asyncio.to_thread(self.weights.reader.staged.receive, offer)

    async def _answer(self, token_ids: list[int], count: int, **more: Any) -> dict[str, Any]:
        """A finished answer of `count` tokens."""
        body = self._body(GenerateRequest(token_ids=token_ids, sampling=Sampling(max_new_tokens=count)))
        return await self.server.call("POST", SGLangStream.path, body | {"stream": False} | more)

    async def _sample(self, token_ids: list[int], count: int) -> Sampled:
        answer = await self._answer(token_ids, count)
        return Sampled(answer["output_ids"], logprobs_of(answer))

    async def _score(self, token_ids: list[int]) -> list[Scored]:
        meta = (await self._answer(token_ids, 1, logprob_start_len=0, top_logprobs_num=1))["meta_info"]
        tops = [top[0] for top in meta["input_top_logprobs"][1:]]
        pairs = zip(meta["input_token_logprobs"][1:], tops, strict=True)
        return [Scored(own[0], likeliest, logprob) for own, (logprob, likeliest, *_) in pairs]

    async def _try_out(self) -> list[str]:
        answer = await self._answer([0], 1)
        if not logprobs_of(answer):
            raise EngineError("SGLang sampled nothing", retryable=False)
        if "weight_versions" not in answer["meta_info"]:
            raise EngineError("SGLang does not report the version of each token; take a newer one", retryable=False)
        limits = [
            "with top_k or top_p, logprobs are of the whole distribution at the temperature, before truncation",
            "what an answer gets after a weight update is handed on at its end: SGLang reports no earlier which version"
            " sampled which token",
        ]
        if await asyncio.to_thread(has_vision_tower, self.model):
            limits.append(BLIND)
        if not self._seeds:
            limits.append("requests with a seed are refused: SGLang honours seeds with enable_deterministic_inference")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.seed is not None and not self._seeds:
            raise BadRequest("sampling.seed", "this SGLang honours no seeds; see enable_deterministic_inference")

    def _send(self, request: GenerateRequest, seen: Sequence[SeenImage], adapter: str | None) -> SGLangStream:
        routed, body = RoutedAnswer.of(request, self.layers), self._body(request)
        if adapter is not None:
            body["lora_path"] = adapter
        return SGLangStream(self.server.events, body, self.weights.version, routed)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_params(request.sampling)
        if self._seeds:  # without one SGLang takes the same for all, and a group of answers would be one answer
            seed = request.sampling.seed
            params["sampling_seed"] = secrets.randbits(31) if seed is None else seed
        start = request.routed_experts_from
        routed = {} if start is None else {"return_routed_experts": True, "routed_experts_start_len": start}
        return {
            "rid": uuid.uuid4().hex,  # SGLang aborts by prefix: all have one length
            "input_ids": request.token_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "cache_salt": self.weights.cache_salt,
            **routed,
        }


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """SGLang's names. Not `ignore_eos`: it would ignore the caller's ids too (see `sglang_model`)."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
