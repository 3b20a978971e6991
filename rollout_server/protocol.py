"""What crosses the wire between an agent worker, a sidecar and an engine. No torch here.

RolloutClient ──POST /generate──► sidecar ──Engine protocol──► engine process
              ◄── NDJSON chunks ──        ◄── Chunk stream ──
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
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
