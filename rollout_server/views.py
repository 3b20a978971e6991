"""What a sidecar's routes answer, as models: the OpenAPI schema is made from them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from penstock.rollout_server.protocol import EngineInfo, LoadReport

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
