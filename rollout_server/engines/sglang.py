"""The stock SGLang server as an engine: its routes, bodies and reservations."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.answer_stream import AnswerStream
from penstock.rollout_server.engines.child_server import ChildServer
from penstock.rollout_server.engines.sglang_server import SGLangServer
from penstock.rollout_server.engines.sglang_stream import SGLangStream, logprobs_of
from penstock.rollout_server.engines.sglang_weights import (
    VersionReader,
    expected_checksums,
    first_difference,
    folder_tensors,
    shown_as_folder,
)
from penstock.rollout_server.engines.stock_engine import StockEngine
from penstock.rollout_server.engines.stock_weights import StockWeights
from penstock.rollout_server.protocol import BadRequest, EngineError, GenerateRequest, Sampling

PAUSES = {"keep": "in_place", "recompute": "retract", "abort": "abort"}
"""rollout.pause → SGLang's word."""
Fetched = tuple[Path, dict[str, str]]
"""(a folder that holds the version, the checksums that SGLang must tell after loading it)"""


class SGLangWeights(StockWeights[Fetched]):
    """By files, which SGLang loads from a folder, and by the checksums that it tells afterwards."""

    version_path = "/model_info"

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        super().__init__(config, model, server, streams)
        self.checked: list[str] = []
        """SGLang's parameters whose checksums we can compute, on every rank; none where they are of another kind."""
        self._ranks = 1
        self._reader = VersionReader(self.shapes)

    async def _look(self) -> list[str]:
        ranks = await self._checksums()
        self._ranks = len(ranks)
        tensors = await asyncio.to_thread(folder_tensors, self.model)
        names = list(ranks[0]) if ranks else []
        expected = await asyncio.to_thread(expected_checksums, tensors, names, self.config.dtype)
        alike = [name for name in sorted(expected) if all(held.get(name) == expected[name] for held in ranks)]
        # Of several ranks each holds some parameters whole, norms mostly, and its part of the others.
        self.checked = alike if len(alike) == len(expected) or len(ranks) > 1 else []
        if not self.checked:
            return ["weights are verified before loading only: this SGLang's checksums cannot be computed here"]
        if len(self.checked) == len(expected):
            return []
        part = f"{len(self.checked)} of {len(expected)} parameters"
        return [f"what {part} hold is verified after loading, of the others before it only: ranks hold parts of them"]

    @asynccontextmanager
    async def _fetch(self, manifest: Mapping[str, Any]) -> AsyncGenerator[Fetched]:
        file, expected = await asyncio.to_thread(self._read, manifest)
        with shown_as_folder(file, self.server.folder / f"weights-{manifest['version']}") as folder:
            yield folder, expected

    def _read(self, manifest: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
        file, tensors = self._reader.read(manifest)
        return file, expected_checksums(tensors, self.checked, self.config.dtype)

    async def _pause(self) -> None:
        await self.server.call("POST", "/pause_generation", {"mode": PAUSES[self.config.pause]})

    async def _load(self, version: int, fetched: Fetched) -> None:
        body = {
            "model_path": str(fetched[0]),
            "weight_version": str(version),
            "abort_all_requests": False,
            # With requests frozen in place it would be refused, and the update with it; the salts do its work.
            "flush_cache": self.config.pause != "keep",
        }
        await self.server.call("POST", "/update_weights_from_disk", body)

    async def _verify(self, fetched: Fetched) -> None:
        """Until it returns the version's file must be there: to a load SGLang answers when its first rank has read it.

        Checksums are gathered from all ranks, so each has read it by then.
        """
        _, expected = fetched
        if not expected and self._ranks == 1:
            return
        for rank, held in enumerate(await self._checksums(all_of_them=bool(expected))):
            if name := first_difference(expected, held):
                raise EngineError(f"rank {rank} of SGLang holds other values than it was told to load in {name}")

    async def _resume(self) -> None:
        # Its default empties the cache of a GPU, and fails where there is none.
        await self.server.call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def _checksums(self, *, all_of_them: bool = True) -> list[dict[str, str]]:
        """Of each parameter, for each rank; of no parameter unless `all_of_them`."""
        body: dict[str, Any] = {"action": "checksum"}
        if not all_of_them:
            body["skip_tensor_list"] = [""]  # names that contain it
        answer = await self.server.call("POST", "/weights_checker", body)
        return [dict(rank["checksums"]) for rank in answer.get("ranks") or []]


class SGLangEngine(StockEngine):
    """Implements `protocol.Engine`."""

    server_class = SGLangServer
    weights_class = SGLangWeights
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

    @property
    def _seeds(self) -> bool:
        return bool(self.config.sglang_args.get("enable_deterministic_inference"))

    async def _try_out(self) -> list[str]:
        body = self._body(GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))) | {"stream": False}
        answer = await self.server.call("POST", SGLangStream.path, body)
        if not logprobs_of(answer):
            raise EngineError("SGLang sampled nothing", retryable=False)
        if "weight_versions" not in answer["meta_info"]:
            raise EngineError("SGLang does not report the version of each token; take a newer one", retryable=False)
        limits = [
            "with top_k or top_p, logprobs are of the whole distribution at the temperature, before truncation",
            "what an answer gets after a weight update is handed on at its end: SGLang tells no earlier which version"
            " sampled which token",
        ]
        if not self._seeds:
            limits.append("requests with a seed are refused: SGLang honours seeds with enable_deterministic_inference")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.seed is not None and not self._seeds:
            raise BadRequest("sampling.seed", "this SGLang honours no seeds; see enable_deterministic_inference")

    def _send(self, request: GenerateRequest) -> SGLangStream:
        return SGLangStream(self.server.http, self._body(request), self.weights.version)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_params(request.sampling)
        if self._seeds:  # without one SGLang takes the same for all, and a group of answers would be one answer
            seed = request.sampling.seed
            params["sampling_seed"] = secrets.randbits(31) if seed is None else seed
        return {
            "rid": uuid.uuid4().hex,  # SGLang aborts by prefix: all have one length
            "input_ids": request.token_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "cache_salt": self.weights.cache_salt,
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
