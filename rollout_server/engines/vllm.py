"""The vLLM engine: its token stream, its weight swap, its routes. `vllm_server` starts the process.

Tokens are labelled with the engine's version when they are received. That is exact because versions change only while
the engine is paused and idle, and only after every token sampled before the pause was received, in each process that
reads them (`answer_labels`); vLLM's own spans arrive with the last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import check_complete, fetch_model, has_vision_tower
from penstock.rollout_server.engines.http_engine import HttpEngine, HttpWeights
from penstock.rollout_server.engines.http_stream import AnswerEvent, AnswerStream, RoutedAnswer, version_of
from penstock.rollout_server.engines.image_reader import ImageReader
from penstock.rollout_server.engines.server_process import ChildServer
from penstock.rollout_server.engines.vllm_images import SEEN_KINDS, difference, features, image_token_of, places_of
from penstock.rollout_server.engines.vllm_plugin import LOST, REFUSED
from penstock.rollout_server.engines.vllm_server import MODEL_NAME, VLLMServer
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import (
    BadRequest,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Sampling,
    SleepLevel,
)
from penstock.rollout_server.routed_experts import decode_rows
from penstock.weight_sync import GLOO, NCCL, Manifest, Offer, WeightsRefused, WeightsUnreachable

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
MAX_TEMPERATURE = 2.0
READ_POLL_S = 0.01
STAGE_S = 30.0
"""Beside a broadcast's own deadline."""
GIVE_UP_S = 5.0
"""For ending the session of a swap that was cancelled: the engine ends soon after."""
PAUSES = {
    "keep": "mode=keep&clear_cache=false",
    "recompute": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
"""rollout.pause → vLLM's words."""


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
                self._check_fed(event)
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
            self._finish(last)

    def _check_fed(self, event: AnswerEvent) -> None:
        """Before the first tokens. Raises `EngineError`: no server of this kind would do otherwise."""
        fed, self._fed = self._fed, None
        if fed is not None and (differs := difference(event, *fed)):
            raise EngineError(f"images: vLLM did not take the request as it was sent: {differs}", retryable=False)

    def _finish(self, choice: dict[str, Any]) -> None:
        if choice["finish_reason"] not in _FINISH:
            raise EngineError(f"vLLM ended the answer with {choice['finish_reason']!r}")
        spans = choice.get("weight_versions")
        reported = spans and [(span["start"], version_of(span["version"])) for span in spans]
        reason = _FINISH[choice["finish_reason"]]
        self._route(choice.get("routed_experts"), reason)
        self._end(reason, reported)

    def _rows(self, found: str) -> NDArray[Any]:
        """Base64 of a ``.npy`` file."""
        rows = decode_rows([found])
        assert rows is not None
        return rows


class VLLMWeights(HttpWeights[Manifest]):
    """By our weight-transfer engine in vLLM's workers (`vllm_worker`), which receives manifests.

    vLLM has one session of updates at a time, and a swap has one from its first byte until the weights are loaded. A
    broadcast may begin meanwhile: it is staged in that session, which it leaves as it is, or else in one of its own.
    """

    version_path = "/weight_info"
    verifies_late = True
    """Comparing every parameter would take longer than loading them."""
    world_size = 1
    _compared = Path()
    """Where the workers say how they found what they hold since the last load."""

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        super().__init__(config, model, server, streams)
        self._calls = asyncio.Lock()
        """Held from a look at `_in_session` until the calls that depend on it are answered; never while waiting."""
        self._in_session = False
        """A swap's session is open in vLLM."""

    async def _look(self) -> list[str]:
        await self.server.call("POST", "/update_weight_version", {"new_version": "0"})
        self.world_size = int((await self.server.call("GET", "/get_world_size"))["world_size"])
        return []

    @asynccontextmanager
    async def _fetch(self, manifest: Manifest) -> AsyncGenerator[Manifest]:
        """The workers read and verify in the background: what is left of it later would lengthen the pause."""
        check_complete(manifest, self.shapes)
        try:
            await self._read(manifest)
            yield manifest
        except asyncio.CancelledError:
            await self._give_up_session()
            raise
        finally:
            self._in_session = False  # ended; or the server is, by who sees the error

    async def _read(self, manifest: Manifest) -> None:
        """Begins the swap's session, which is open afterwards unless this raises `WeightsRefused`,
        `WeightsUnreachable`."""
        report = self._folder("read-")
        try:
            async with self._calls:
                self._in_session = True
                await self.server.call("POST", "/start_weight_update")
                await self._update(manifest, "fetch", report=str(report))
            if refusal := await self._until_said(report, "read the weights"):
                await self._finish()  # without a label
                raise WeightsUnreachable(refusal) if refusal.startswith(LOST) else WeightsRefused(refusal)
        finally:
            shutil.rmtree(report, ignore_errors=True)

    async def _finish(self, label: Mapping[str, str] | None = None) -> None:
        """Ends the swap's session."""
        async with self._calls:
            self._in_session = False
            await self.server.call("POST", "/finish_weight_update", label)

    async def _give_up_session(self) -> None:
        """The swap was cancelled, in whatever call; the server may have ended with it."""
        if self._in_session:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await self._finish()

    async def stage(self, offer: Offer) -> str:
        """Let the first worker receive a broadcast, also while a swap is under way. See `StagingEngine`."""
        report = self._folder("staged-")
        info = {"manifest": {}, "phase": "stage", "report": str(report), "offer": offer.as_dict()}
        try:
            async with self._calls:
                await self._stage(info)
            return await self._until_staged(offer, report)
        finally:
            shutil.rmtree(report, ignore_errors=True)

    async def _stage(self, info: Mapping[str, Any]) -> None:
        """In the session of a swap: one of its own would drop what that swap has read."""
        alone = not self._in_session
        if alone:
            await self.server.call("POST", "/start_weight_update")
        await self.server.call("POST", "/update_weights", {"update_info": info})
        if alone:
            await self.server.call("POST", "/finish_weight_update")  # without a label

    async def _until_staged(self, offer: Offer, report: Path) -> str:
        """The state that came. Raises `WeightsUnreachable` where not all did, `EngineError` where vLLM is gone."""
        deadline = time.monotonic() + offer.deadline_s + STAGE_S
        while not (said := _said(report)) and time.monotonic() < deadline:
            if not self.server.alive:
                raise EngineError(f"vLLM's workers did not receive a broadcast; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)
        state = said[0] if said else f"{LOST}no worker said that it received it"
        if state.startswith(LOST):
            raise WeightsUnreachable(f"version {offer.version}: {state.removeprefix(LOST)}")
        return state

    def _folder(self, prefix: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.server.folder))

    async def _until_said(self, report: Path, what: str) -> str:
        """The first complaint, or empty once every worker has none. Raises `EngineError` where one did not `what`."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            said = _said(report)
            if any(said) or len(said) >= self.world_size:
                return next(filter(None, said), "")
            if not self.server.alive or time.monotonic() > deadline:
                raise EngineError(f"vLLM's workers did not {what}; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)

    async def _pause(self) -> None:
        await self.server.call("POST", f"/pause?{PAUSES[self.config.pause]}")  # returns when vLLM is idle

    async def _load(self, version: int, fetched: Manifest) -> None:
        self._compared = self._folder("held-")
        try:
            await self._load_in_session(fetched)
        except EngineError as error:
            shutil.rmtree(self._compared, ignore_errors=True)
            # Of several ranks one may have refused what the others loaded: then the server must end.
            _, refused, reason = str(error).partition(REFUSED)
            if refused and self.world_size == 1:
                raise WeightsRefused(reason) from error
            raise
        await self._finish({"weight_version": str(version)})

    async def _load_in_session(self, fetched: Manifest) -> None:
        async with self._calls:
            try:
                await self._update(fetched, "load", report=str(self._compared))
            except BaseException:
                self._in_session = False  # vLLM ends the session of an update that fails
                raise

    async def _verify(self, fetched: Manifest) -> None:
        """Each worker compares what it holds since the load with the verified bytes."""
        try:
            complaint = await self._until_said(self._compared, "compare the weights that they hold")
        finally:
            shutil.rmtree(self._compared, ignore_errors=True)
        if complaint:
            raise EngineError(f"a worker of vLLM {complaint}")

    async def _resume(self) -> None:
        await self.server.call("POST", "/resume")

    async def _sleep(self, level: SleepLevel) -> None:
        await self.server.call("POST", f"/sleep?level={level}&mode=abort")  # returns when it sleeps

    async def _wake(self) -> None:
        await self.server.call("POST", "/wake_up")

    async def _update(self, manifest: Manifest, phase: str, *, report: str = "") -> None:
        info = {"manifest": manifest.as_dict(), "phase": phase, "report": report}
        await self.server.call("POST", "/update_weights", {"update_info": info})


def _said(report: Path) -> list[str]:
    """See `vllm_worker.FileUpdateInfo.report`."""
    return [file.read_text() for file in report.glob("[0-9]*")]


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
    server: VLLMServer
    images: ImageReader | None = None
    """Of a model that is given images."""
    _image_token = -1

    async def start(self) -> EngineInfo:
        """See `HttpEngine.start`."""
        folder = await asyncio.to_thread(fetch_model, self.model)
        token = await asyncio.to_thread(image_token_of, folder)
        if token is not None:
            self._image_token, self.server.sees_images = token, True
            self.images = ImageReader(self.config, str(folder), self.server.log_path.parent)
            await self.images.start()
        try:
            return await super().start()
        except BaseException:
            await self._stop_images()
            raise

    async def stop(self) -> None:
        """See `HttpEngine.stop`."""
        try:
            await super().stop()
        finally:
            await self._stop_images()

    async def _stop_images(self) -> None:
        if self.images is not None:
            await self.images.stop()

    async def healthy(self) -> bool:
        """See `HttpEngine.healthy`; so does what reads images."""
        return await super().healthy() and (self.images is None or self.images.alive)

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
        """See `StagingEngine`: one receives for all of them, which are on one machine."""
        return 1

    @property
    def weight_wires(self) -> tuple[str, ...]:
        """See `StagingEngine`."""
        nccl = self.server.installation.nccl if self.server.installation else ""
        return (f"{NCCL}{nccl}", GLOO) if nccl and self.config.weight_transport == "nccl" else (GLOO,)

    async def stage_weights(self, offer: Offer) -> str:
        """See `StagingEngine`."""
        self._check_running()
        return await self.weights.stage(offer)

    async def _try_out(self) -> list[str]:
        body = self._body(GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))) | {"stream": False}
        choice = (await self.server.call("POST", VLLMStream.path, body))["choices"][0]
        if not (choice.get("logprobs") or {}).get("content"):
            raise EngineError("vLLM returns no logprobs from its token endpoint", retryable=False)
        limits = [f"temperatures above {MAX_TEMPERATURE:g} are refused"]
        if self.images is None and await asyncio.to_thread(has_vision_tower, self.model):
            limits.append(f"images are refused: vLLM is given those of models of type {' and '.join(SEEN_KINDS)}")
        if choice.get("weight_versions") is None:
            limits.append("this vLLM does not report the version of each token: they are labelled on receipt, unproven")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.temperature > MAX_TEMPERATURE:
            raise BadRequest("sampling.temperature", f"vLLM takes {MAX_TEMPERATURE:g} at most")

    def _send(self, request: GenerateRequest, seen: Sequence[SeenImage]) -> VLLMStream:
        routed = RoutedAnswer.of(request, self.layers)
        places = places_of(request.token_ids, self._image_token, seen) if seen else []
        body = self._body(request)
        if seen:
            body |= {"features": features(seen, places, self.labels.cache_salt), "return_token_ids": True}
        stream = VLLMStream(self.server.events, body, self.labels.version, routed)
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
            "cache_salt": self.labels.cache_salt,
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
