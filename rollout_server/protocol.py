"""The messages between agent worker, rollout server and engine. No torch here.

RolloutClient ──POST /generate──► rollout server ──Engine protocol──► engine process
              ◄── NDJSON chunks ──               ◄── Chunk stream ──
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, Strict

from penstock.transfer_queue import RoutedExperts
from penstock.weight_sync import LoadReport, Manifest

FinishReason = Literal["stop", "length", "abort"]
MOST = 2**31 - 1
Count = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Label = Annotated[str, Field(max_length=1024)]


# /generate ---------------------------------------------------------------------------------------------------------
class Sampling(BaseModel):
    """Settings of the draw. Truncated sampling (top_p < 1, top_k > 0) biases the policy gradient."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Number = Field(1.0, ge=0.0, le=100.0)
    top_p: Number = Field(1.0, gt=0.0, le=1.0)
    top_k: Count = Field(-1, ge=-1, le=MOST)
    max_new_tokens: Count = Field(256, gt=0, le=MOST)
    stop_token_ids: tuple[Annotated[Count, Field(ge=0, le=MOST)], ...] = ()
    seed: Count | None = Field(None, ge=0, le=2**63 - 1)


class ImageRef(BaseModel):
    """An image by its content; the reader verifies the bytes against `sha256`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    url: str = Field(pattern="^(file:///|data:image/)")
    """``file:///…`` on a file system shared with the server, or ``data:image/…;base64,…``."""


class AdapterRef(BaseModel):
    """A LoRA adapter by its content; the server verifies the bytes against `sha256`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """The digest of ``adapter_model.safetensors``."""
    folder: str = Field(pattern="^/", max_length=4096)
    """peft's folder on a file system shared with the server; its tensors have the names of the model's files."""


class GenerateRequest(BaseModel):
    """Body of POST /generate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: list[Count] = Field(min_length=1)
    """The exact context: the prompt and all tokens sampled so far."""
    images: tuple[ImageRef, ...] = ()
    """Images in the order of their placeholders in `token_ids`, which the model's processor has expanded already."""
    adapter: AdapterRef | None = None
    """The answer is sampled by the model with this adapter; None: by the model alone."""
    sampling: Sampling = Sampling()
    request_id: Label = ""
    episode_id: Label = ""
    routed_experts_from: Count | None = Field(None, ge=0, le=MOST)
    """First position in `token_ids` whose experts the answer reports, for mixtures of experts; None: no experts."""
    min_version: Count = 0
    """409 where the server's weights are older."""
    split: Label = Field("train", exclude=True)
    """The task's split: all but ``train`` go to the evaluation server, if there is one. Not sent."""
    prefix: Label = Field("", exclude=True)
    """Names what the context shares with others at its start, as the prompt of a group; requests of one name go to one
    server where its load allows it. Empty: nothing. Not sent."""
    whole: bool = False
    """The answer is read at its end: its first tokens may be held back for a moment, as all others are."""
    deadline_s: Number | None = Field(None, gt=0, le=86_400)
    """Seconds from now; then the server frees the engine and answers 504, or ends with an error line."""


class Chunk(BaseModel):
    """One line of the NDJSON answer: further tokens. The last one has a `finish_reason`."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    """Logprobs of `token_ids` in the distribution that they were sampled from (temperature applied)."""
    version_spans: list[tuple[int, int, int]] = []
    """(version, start, end) over positions of THIS chunk's `token_ids`; covers all of them."""
    finish_reason: FinishReason | None = None
    routed_experts: list[str] = []
    """Present if the request asks for them: see `routed_experts.py`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer of N sampled tokens, from one server or several."""

    token_ids: list[int]
    """[N]"""
    logprobs: list[float]
    """[N], in the distribution that each token was sampled from."""
    version_spans: list[tuple[int, int, int]]
    """(policy version, start, end) over positions of `token_ids`; covers all of them."""
    finish_reason: FinishReason
    continued_over_update: bool = False
    """One server swapped weights in the middle of this answer."""
    resumed: int = 0
    """Times that it was resumed at a server, with the tokens so far, after it broke off."""
    routed_experts: RoutedExperts | None = None
    """[R, layers, k] of the R positions before the last token's; None: not requested, or not reported."""
    text: str = ""
    """`token_ids` decoded, special tokens kept; set by `EpisodeLLM`, since a client has no tokenizer."""


class EngineInfo(BaseModel):
    """Properties that an engine reports once it is up."""

    name: str
    engine_version: str
    version: int
    """Policy version of the loaded weights, as the engine itself reports it."""
    vocab_size: int
    max_model_len: int
    images: bool = False
    """True if it takes requests with images."""
    routed_experts: bool = False
    """True if it reports which experts read each token."""
    adapter_rank: int = 0
    """Largest rank of an adapter that a request may name; 0: none may."""
    limits: list[str] = []
    """Limits of this engine, one sentence each; printed at start."""


# engines -----------------------------------------------------------------------------------------------------------
class EngineError(Exception):
    """The engine refused, failed or has ended. `retryable`: another server may succeed."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class VersionsDisproved(EngineError):
    """The server's own report gives other versions to tokens that were handed on.

    No token of this server's part of the answer may be trained on: its version is unknown.
    """


class BadRequest(EngineError):
    """The request is invalid at every server. `field` names the cause in it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", retryable=False)
        self.field = field


class Engine(Protocol):
    """One engine process, owned by one sidecar. `start` comes first, `stop` last; the others may interleave."""

    async def start(self) -> EngineInfo:
        """Starts the process and waits until it samples, within `start_timeout_s`. Raises `EngineError`."""

    async def stop(self) -> None:
        """Ends the process and everything it started."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Streams the answer. Closing the generator early aborts the request in the engine."""
        yield Chunk()

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        """Fetches, verifies, pauses, loads, sets the version, resumes. Raises `WeightsRefused`, `EngineError`."""

    async def healthy(self) -> bool:
        """The process is alive and answers."""

    def stderr_tail(self) -> str:
        """The last lines of the engine's log, for error messages."""


SleepLevel = Literal[1, 2]
"""Depth of an engine's sleep, which frees its KV cache: 1 moves its weights to the host, 2 drops them."""


class DeviceBytes(NamedTuple):
    """Bytes of an engine's weights and KV cache on its devices; 0 and 0 if not measured."""

    used: int
    most: int
    """Largest number while it is awake."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release the memory of its devices. All but `will_sleep` come between `start` and `stop`."""

    def will_sleep(self, level: SleepLevel) -> None:
        """Before `start`: the process is made for it."""

    async def device_bytes(self) -> DeviceBytes:
        """Raises `EngineError`."""

    async def sleep(self, level: SleepLevel) -> None:
        """Answers in flight, and those asked for until `wake`, end as ``abort`` with the tokens that they have. Returns
        when the memory is free. Raises `EngineError`: then only its end frees it."""

    async def wake(self) -> None:
        """Has its memory back; after level 2 it samples nothing before `load_weights`. Raises `EngineError`."""


def fit_request(request: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """Returns the request with `max_new_tokens` limited to the rest of the context length. Raises `BadRequest`."""
    ids = request.token_ids
    if not ids:
        raise BadRequest("token_ids", "is empty; an engine needs at least one token of context")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < info.vocab_size)
        raise BadRequest(f"token_ids.{wrong}", f"{ids[wrong]} is outside the vocabulary of {info.vocab_size}")
    if request.images and not info.images:
        raise BadRequest("images", f"the {info.name} engine takes none with this model; its limits say why")
    if request.adapter is not None and not info.adapter_rank:
        raise BadRequest("adapter", f"the {info.name} engine was not started with rollout.adapter_rank")
    if request.routed_experts_from is not None and not info.routed_experts:
        raise BadRequest("routed_experts_from", f"the {info.name} engine was not started with routing_replay: true")
    room = info.max_model_len - len(ids)
    if room < 1:
        raise BadRequest(
            "token_ids", f"{len(ids)} tokens leave no room to answer: rollout.max_model_len is {info.max_model_len}"
        )
    if room >= request.sampling.max_new_tokens:
        return request
    return request.model_copy(update={"sampling": request.sampling.model_copy(update={"max_new_tokens": room})})


def refuse_truncation(sampling: Sampling) -> None:
    """Raises `BadRequest` for truncated sampling: the gradient would be that of another policy."""
    fix = "leave it at {}, or set rollout.truncated_sampling: true to accept the bias of the policy gradient"
    if sampling.top_p < 1.0:
        raise BadRequest("sampling.top_p", f"{sampling.top_p:g} truncates the policy; {fix.format(1)}")
    if sampling.top_k > 0:
        raise BadRequest("sampling.top_k", f"{sampling.top_k} truncates the policy; {fix.format(-1)}")


# version spans: (policy version, start, end) over token positions --------------------------------------------------
Span = tuple[int, int, int]


def extend_spans(spans: list[Span], more: Iterable[Span], offset: int) -> None:
    """Appends `more`, shifted by `offset` positions, to `spans` in place; joins neighbours of one version."""
    for version, start, end in more:
        if spans and spans[-1][0] == version and spans[-1][2] == start + offset:
            spans[-1] = (version, spans[-1][1], end + offset)
        else:
            spans.append((version, start + offset, end + offset))


def slice_spans(cuts: list[tuple[int, int]], start: int, end: int) -> list[Span]:
    """Spans of positions `start … end`, counted from `start`; `cuts` are (first position, version), ascending."""
    spans: list[Span] = []
    for i, (first, version) in enumerate(cuts):
        last = cuts[i + 1][0] if i + 1 < len(cuts) else end
        low, high = max(first, start), min(last, end)
        if low < high:
            spans.append((version, low - start, high - start))
    return spans


def versions_of(versions: set[int]) -> dict[str, int]:
    """Attributes of a span: ``version``, the newest, and ``version_oldest`` if it differs."""
    if not versions:
        return {}
    newest, oldest = max(versions), min(versions)
    return {"version": newest} if newest == oldest else {"version": newest, "version_oldest": oldest}


# bodies of the other routes ----------------------------------------------------------------------------------------
class Health(BaseModel):
    """Body of GET /health, with 200 and with 503."""

    ok: bool
    """Requests are accepted, the engine answers, and a token was sampled lately."""
    cause: str
    draining: bool
    engine: EngineInfo | None
    version: int
    in_flight: int
    in_flight_tokens: int
    sampled_s_ago: float
    """Since the last token, of a request or of a probe."""
    restarts: int
    """Engine restarts since this server started."""
    queue: str
    """``ok`` or the last error."""
    weights_refused: int | None
    """Version that did not verify, until another is announced."""


class Draining(BaseModel):
    """Body of POST /drain."""

    draining: bool
    in_flight: int


class ModelEntry(BaseModel):
    """The one model that a server serves."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "penstock"
    max_model_len: int | None
    policy_version: int


class ModelList(BaseModel):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]
