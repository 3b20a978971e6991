"""What crosses the wire between an agent worker, a sidecar and an engine. No torch here.

RolloutClient ──POST /generate──► sidecar ──Engine protocol──► engine process
              ◄── NDJSON chunks ──        ◄── Chunk stream ──

What every engine refuses in the same words: contexts that are too long, ids that the model does not have.

Version spans: (policy version, start, end) rows over token positions, and how they are put together.

What a sidecar's routes answer, as models: the OpenAPI schema is made from them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, Strict

FinishReason = Literal["stop", "length", "abort"]
MOST = 2**31 - 1
Count = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Label = Annotated[str, Field(max_length=1024)]


class Sampling(BaseModel):
    """How tokens are drawn. Truncated sampling (top_p < 1, top_k > 0) biases the policy gradient."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Number = Field(1.0, ge=0.0, le=100.0)
    top_p: Number = Field(1.0, gt=0.0, le=1.0)
    top_k: Count = Field(-1, ge=-1, le=MOST)
    max_new_tokens: Count = Field(256, gt=0, le=MOST)
    stop_token_ids: tuple[Annotated[Count, Field(ge=0, le=MOST)], ...] = ()
    seed: Count | None = Field(None, ge=0, le=2**63 - 1)


class ImageRef(BaseModel):
    """An image by its content. Who reads it checks the bytes against `sha256`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    url: str = Field(pattern="^(file:///|data:image/)")
    """``file:///…`` on a file system that the server shares, or ``data:image/…;base64,…``."""


class GenerateRequest(BaseModel):
    """Body of POST /generate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_ids: list[Count] = Field(min_length=1)
    """The exact context, prompt and whatever was already sampled."""
    images: tuple[ImageRef, ...] = ()
    """In the order of their places in `token_ids`, which are as wide already as the model's processor makes them."""
    sampling: Sampling = Sampling()
    request_id: Label = ""
    episode_id: Label = ""
    min_version: Count = 0
    """409 where the server's weights are older."""
    split: Label = Field("train", exclude=True)
    """Of the episode's task: where there is a server for evaluations, they go there. Does not travel."""
    deadline_s: Number | None = Field(None, gt=0, le=86_400)
    """Seconds from now; the server gives up then, frees the engine, and says 504 or ends with an error line."""


class Chunk(BaseModel):
    """One line of the NDJSON answer: some more tokens. The last one carries `finish_reason`."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    """Of `token_ids`, at the sampling temperature (of the distribution that was sampled from)."""
    version_spans: list[tuple[int, int, int]] = []
    """(version, start, end) over positions of THIS chunk's `token_ids`; covers all of them."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer, as the client hands it to an agent: N sampled ids, however many servers sampled them."""

    token_ids: list[int]
    """[N]"""
    logprobs: list[float]
    """[N] of the distribution that each id was drawn from."""
    version_spans: list[tuple[int, int, int]]
    """(policy version, start, end) over positions of `token_ids`; they cover all of them."""
    finish_reason: FinishReason
    continued_over_update: bool = False
    """Weights were swapped under this answer while one server sampled it, without a break."""
    resumed: int = 0
    """Times it went on at a server after a break, with the tokens so far."""


class LoadReport(BaseModel):
    """What one weight swap cost, as the engine measured it."""

    version: int
    fetch_s: float
    """Reading and verifying the bytes, decoding going on."""
    pause_s: float
    """From the moment decoding stops until it goes on."""
    load_s: float
    """Copying into the model, inside the pause."""
    in_flight: int
    """Requests frozen by the pause that went on after it."""


class EngineInfo(BaseModel):
    """What an engine says of itself once it is up."""

    name: str
    engine_version: str
    version: int
    """Policy version of the loaded weights, as the engine itself reports it."""
    vocab_size: int
    max_model_len: int
    images: bool = False
    """It takes requests with images."""
    limits: list[str] = []
    """What this engine cannot do, one sentence each; printed at start."""


class EngineError(Exception):
    """The engine refused, failed or is gone. `retryable` says whether another server may try."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class Engine(Protocol):
    """One engine process, owned by one sidecar. `start` comes first, `stop` always last; the rest may interleave."""

    async def start(self) -> EngineInfo:
        """Start the process and wait until it samples, within `start_timeout_s`. Raises `EngineError`."""

    async def stop(self) -> None:
        """End the process and everything it started."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Stream the answer. Closing the generator early aborts the request in the engine."""
        yield Chunk()

    async def load_weights(self, manifest: Mapping[str, Any]) -> LoadReport:
        """Fetch, verify, pause, load, set version, resume. Raises `WeightsRefused`, `EngineError`."""

    async def healthy(self) -> bool:
        """The process lives and answers."""

    def stderr_tail(self) -> str:
        """The last lines of the engine's log, for error messages."""


class BadRequest(EngineError):
    """The request can never be served, here or elsewhere. `field` names what is wrong in it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", retryable=False)
        self.field = field


def fit_request(request: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """The request with `max_new_tokens` cut to what the context length leaves. Raises `BadRequest`."""
    ids = request.token_ids
    if not ids:
        raise BadRequest("token_ids", "is empty; an engine needs at least one token to go on from")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < info.vocab_size)
        raise BadRequest(f"token_ids.{wrong}", f"{ids[wrong]} is outside the vocabulary of {info.vocab_size}")
    if request.images and not info.images:
        raise BadRequest("images", f"the {info.name} engine with this model takes none")
    room = info.max_model_len - len(ids)
    if room < 1:
        raise BadRequest(
            "token_ids", f"{len(ids)} tokens leave no room to answer: rollout.max_model_len is {info.max_model_len}"
        )
    if room >= request.sampling.max_new_tokens:
        return request
    return request.model_copy(update={"sampling": request.sampling.model_copy(update={"max_new_tokens": room})})


def refuse_truncation(sampling: Sampling) -> None:
    """Raises `BadRequest` for sampling that leaves out part of the policy: its gradient would be of another policy."""
    mend = "leave it at {}, or set rollout.truncated_sampling: true if the bias of the policy gradient is wanted"
    if sampling.top_p < 1.0:
        raise BadRequest("sampling.top_p", f"{sampling.top_p:g} truncates the policy; {mend.format(1)}")
    if sampling.top_k > 0:
        raise BadRequest("sampling.top_k", f"{sampling.top_k} truncates the policy; {mend.format(-1)}")


Span = tuple[int, int, int]


def extend_spans(spans: list[Span], more: Iterable[Span], offset: int) -> None:
    """Append `more`, shifted by `offset` positions, joining neighbours of one version. `spans` is changed in place."""
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


def join_chunks(left: Chunk, right: Chunk) -> Chunk:
    """One chunk that says what both say, in order."""
    spans = list(left.version_spans)
    extend_spans(spans, right.version_spans, len(left.token_ids))
    # Both sides were checked when they were made; doing it again costs more than all else here.
    return Chunk.model_construct(
        token_ids=left.token_ids + right.token_ids,
        logprobs=left.logprobs + right.logprobs,
        version_spans=spans,
        finish_reason=right.finish_reason,
    )


LoadOutcome = Literal["loaded", "refused", "unreachable"]


class ErrorDetail(BaseModel):
    field: str
    """What in the request is wrong, dotted; empty where it is not one field."""
    message: str


class ErrorBody(BaseModel):
    """Body of every status of 400 and above."""

    error: ErrorDetail


class Health(BaseModel):
    """Body of GET /health, with 200 and with 503."""

    ok: bool
    """Requests are taken, the engine answers, and a token was sampled lately."""
    cause: str
    draining: bool
    engine: EngineInfo | None
    version: int
    in_flight: int
    in_flight_tokens: int
    sampled_s_ago: float
    """Since the last token, of a request or of a probe."""
    restarts: int
    """Of the engine, since this sidecar started."""
    queue: str
    """``ok`` or the last failure."""
    weights_refused: int | None
    """Version that did not verify, until another is announced."""


class WeightsLoad(BaseModel):
    """One attempt to load announced weights."""

    version: int
    at_unix_s: float
    outcome: LoadOutcome
    cause: str = ""
    report: LoadReport | None = None


class WeightsStatus(BaseModel):
    """Body of GET and POST /weights."""

    version: int
    """Held and sampled from."""
    newest: int | None
    """Announced, as last read from the queue."""
    behind_versions: int
    behind_s: float
    """Since when newer ones are known and none was loaded."""
    last: LoadReport | None
    """The last load that succeeded."""
    refused: int | None
    cause: str
    history: list[WeightsLoad]
    """The newest 20 attempts, oldest first."""


class Draining(BaseModel):
    """Body of POST /drain."""

    draining: bool
    in_flight: int


class ModelEntry(BaseModel):
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
