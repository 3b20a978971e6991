"""The SGLang engine: its token stream, its weight swap with checksums, its routes. `sglang_server` starts the process.

Each event has the tokens since the last one and the version that SGLang's front end had when it received them. The
scheduler sends tokens and the replies to control calls through two sockets, and the second may overtake the first:
tokens of the old version can get the new one's label, never the reverse. So tokens are certain while the label is the
version that the request was sent under; from the first newer one on they wait for the spans of the last event, which
the scheduler itself counts.

SGLang loads a folder of safetensors files and reports the checksum of every parameter that it holds. On CPUs that is
the start of the SHA-256 of its bytes, so it can be computed from the file, for fused parameters from their parts.
Whether a server's checksums are of that kind is determined at its start, on its first weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import uuid
from base64 import b64decode
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import Shapes, check_complete
from penstock.rollout_server.engines.event_client import EventClient
from penstock.rollout_server.engines.http_engine import HttpEngine, HttpWeights
from penstock.rollout_server.engines.http_stream import AnswerEvent, AnswerStream, RoutedAnswer, version_of
from penstock.rollout_server.engines.server_process import ChildServer
from penstock.rollout_server.engines.sglang_server import SGLangServer
from penstock.rollout_server.protocol import (
    BadRequest,
    EngineError,
    FinishReason,
    GenerateRequest,
    Sampling,
    SleepLevel,
)
from penstock.weight_sync import Manifest

ABORT_S = 5.0
"""How long the server may take to note that an answer is not wanted any more."""
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
PAUSES = {"keep": "in_place", "recompute": "retract", "abort": "abort"}
"""rollout.pause → SGLang's word."""
MEMORY_TAGS = ["weights", "kv_cache", "cuda_graph"]
Fetched = tuple[Path, dict[str, str]]
"""(a folder that holds the version, the checksums that SGLang must tell after loading it)"""


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
                await self._events.call("/abort_request", json.dumps({"rid": self._rid}).encode(), ABORT_S)
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
        spans = meta.get("weight_versions")
        reported = spans and [(span["start"], version_of(span["version"])) for span in spans]
        self._route(meta.get("routed_experts"), _FINISH[reason["type"]])
        self._end(_FINISH[reason["type"]], reported)

    def _rows(self, found: str) -> NDArray[Any]:
        """Base64 of int32 numbers, without their shape."""
        assert self._routed is not None
        layers = self._routed.layers
        return np.frombuffer(b64decode(found), dtype="<i4").reshape(-1, layers.all_layers, layers.mixtures.per_token)


def logprobs_of(event: dict[str, Any]) -> list[float]:
    """Of `output_ids`, in order. Raises `EngineError` where SGLang's pairs are of other tokens."""
    pairs = event["meta_info"].get("output_token_logprobs") or []
    if (ids := [pair[1] for pair in pairs]) != event["output_ids"]:
        raise EngineError(f"SGLang sent tokens {event['output_ids']} with logprobs of {ids}")
    return [pair[0] for pair in pairs]


class VersionReader:
    """Reads versions, whole or as changes of the one before, into what SGLang can be shown."""

    def __init__(self, shapes: Shapes) -> None:
        from penstock.weight_sync import WeightReader

        self._shapes = shapes
        self._reader = WeightReader()

    def read(self, manifest: Manifest) -> tuple[int, Mapping[str, Any]]:
        """(descriptor of a safetensors file with the whole version, its tensors). Raises `WeightsRefused`.

        The descriptor is the caller's to close. A trainer that deletes the file meanwhile changes nothing.
        """
        from penstock.weight_sync import open_published

        if manifest.base_version is not None:
            tensors = self._reader.read(manifest)
            check_complete(manifest, self._shapes)
            return file_in_memory(tensors), tensors
        # Opened before it is checked: opened again afterwards, the name could have another file.
        file = open_published(manifest.files[-1])
        try:
            tensors = self._reader.read(manifest, file)
            check_complete(manifest, self._shapes)
        except BaseException:
            os.close(file)
            raise
        return file, tensors


def file_in_memory(tensors: Mapping[str, Any]) -> int:
    """Descriptor of a safetensors file that is on no disk: what a delta leads to was never written as one."""
    from penstock.weight_sync import write_tensors

    file = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as out:
            write_tensors(out, tensors)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def shown_as_folder(file: int, folder: Path) -> Iterator[Path]:
    """`folder`, holding nothing but a link to this process's descriptor `file`; both go at the end."""
    try:
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def expected_checksums(tensors: Mapping[str, Any], names: list[str], dtype: str) -> dict[str, str]:
    """What SGLang's parameters `names` must have as checksums, in hexadecimal, after loading `tensors` as `dtype`.

    Names that are not of the checkpoint (buffers) are left out. The head is the embedding where the two are tied.
    """
    import torch

    from penstock.rollout_server.engines.verify_loaded import parts_of

    kind: torch.dtype = getattr(torch, dtype)
    parts = {name: [part for part in parts_of(name) if part in tensors] for name in names}
    return {
        name: _checksum(torch.cat([tensors[part].to(kind) for part in found])) for name, found in parts.items() if found
    }


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Name of the first parameter whose checksum is another one, None where all agree."""
    return next((name for name in sorted(expected) if found.get(name) != expected[name]), None)


def folder_tensors(model: str) -> dict[str, Any]:
    """All tensors of the model folder's safetensors files, by name; empty where there are none."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def _checksum(tensor: Any) -> str:
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(raw)).hexdigest()[:16]


class SGLangWeights(HttpWeights[Fetched]):
    """By files, which SGLang loads from a folder, and by the checksums that it tells afterwards."""

    version_path = "/model_info"

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        super().__init__(config, model, server, streams)
        self.checked: list[str] = []
        """SGLang's parameters whose checksums we can compute, on every rank; none where they are of another kind."""
        self._ranks = 1
        self._released: list[str] = []
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
    async def _fetch(self, manifest: Manifest) -> AsyncGenerator[Fetched]:
        file, expected = await asyncio.to_thread(self._read, manifest)
        with shown_as_folder(file, self.server.folder / f"weights-{manifest.version}") as folder:
            yield folder, expected

    def _read(self, manifest: Manifest) -> tuple[int, dict[str, str]]:
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

    async def _sleep(self, level: SleepLevel) -> None:
        """What stays of the weights at level 1 is a copy in host memory that the server was started with."""
        # Without that copy they are lost: then they stay where they are, unless they may be dropped.
        self._released = MEMORY_TAGS if level == self.server.sleep_level else MEMORY_TAGS[1:]
        await self.server.call("POST", "/pause_generation", {"mode": "abort"})
        await self.server.call("POST", "/release_memory_occupation", {"tags": self._released})

    async def _wake(self) -> None:
        await self.server.call("POST", "/resume_memory_occupation", {"tags": self._released})
        await self._resume()

    async def _checksums(self, *, all_of_them: bool = True) -> list[dict[str, str]]:
        """Of each parameter, for each rank; of no parameter unless `all_of_them`."""
        body: dict[str, Any] = {"action": "checksum"}
        if not all_of_them:
            body["skip_tensor_list"] = [""]  # names that contain it
        answer = await self.server.call("POST", "/weights_checker", body)
        return [dict(rank["checksums"]) for rank in answer.get("ranks") or []]


class SGLangEngine(HttpEngine):
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
    sleep_routes = ("/release_memory_occupation", "/resume_memory_occupation")

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
        routed = RoutedAnswer.of(request, self.layers)
        return SGLangStream(self.server.events, self._body(request), self.weights.version, routed)

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
