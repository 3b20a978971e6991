"""Requests and responses on the wire. Unknown keys and wrong types are refused.

Every refusal has one shape: ``{"error": {"message", "field"?, "errno"?}}``.

401 no valid token. 404 no such session (any more). 409 a file could not be opened (`errno`). 413 body too long.
422 the request is wrong (`field`). 429 over this token's quota; 503 no free box in time, both with Retry-After and
nothing done; 503 without it: the sandbox failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from penstock.common import add_error_handlers, complete_openapi, error_response
from penstock.sandbox.protocol import (
    BoxNeeds,
    NoSuchImage,
    RunResult,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    UnmetNeeds,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_TIMEOUT_S = 3600.0
MAX_TEXT_CHARS = 8 << 20
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TimeoutS = Annotated[
    float | None,
    Field(None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, description="Null: the server's usual limit."),
]


class WireRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NeedsRequest(WireRequest):
    """Needs of the session in place of the server's settings, within `sandbox.own_limits`."""

    own_root: bool = Field(False, description="A file system to write; refused unless the server has `own_root`.")
    memory_mb: int | None = Field(None, gt=0)
    cpus: float | None = Field(None, gt=0, allow_inf_nan=False)
    storage_mb: int | None = Field(None, gt=0)
    clean_cache: bool = Field(False, description="What it reads of shared files leaves the machine's caches with it.")

    def to_needs(self) -> BoxNeeds:
        return BoxNeeds(**self.model_dump())


class StartRequest(WireRequest):
    label: str = Field("", max_length=256, description="For people and for ending sessions by label.")
    ttl_s: float = Field(900.0, gt=0, le=86400, allow_inf_nan=False, description="Ended after this time without use.")
    image: str | None = Field(None, max_length=512, description="Null: the backend's default.")
    needs: NeedsRequest | None = Field(None, description="Null: a box as the server's settings have it.")
    wait_s: float | None = Field(
        None, ge=0, le=120, allow_inf_nan=False, description="For a free box; at most the server's own limit."
    )


class RunRequest(WireRequest):
    argv: list[Text] = Field(min_length=1, max_length=4096)
    stdin: Text = ""
    cwd: str | None = Field(None, max_length=4096, description="In the box; null: its /tmp.")
    timeout_s: TimeoutS = None


class RunPythonRequest(WireRequest):
    code: Text
    timeout_s: TimeoutS = None


class RunShellRequest(WireRequest):
    command: Text
    timeout_s: TimeoutS = None


class SessionView(BaseModel):
    session_id: str
    label: str
    image: str | None
    ttl_s: float
    idle_s: float
    age_s: float


class Ended(BaseModel):
    ended: int


class ServerHealth(BaseModel):
    sessions: int
    warm: int
    waiting: int
    max_boxes: int
    containment: str


class StreamedOutput(BaseModel):
    """A piece of output, as it is written."""

    stream: Literal["stdout", "stderr"]
    data: str


class StreamError(BaseModel):
    message: str
    lost: bool
    """The session is gone."""


class StreamEnd(BaseModel):
    """The last line: what `run` would have returned, or how the sandbox failed."""

    result: RunResult | None = None
    error: StreamError | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Any:
        if (self.result is None) == (self.error is None):
            raise ValueError("result or error")
        return self


class SandboxErrorDetail(BaseModel):
    message: str
    field: str | None = None
    """Place in the request, as ``body.argv.0``."""
    errno: int | None = None
    """Set if a file could not be opened or written."""


class SandboxErrorBody(BaseModel):
    error: SandboxErrorDetail


class OverQuota(SandboxBusy):
    """This token has used up its quota."""


def handle_errors(app: FastAPI) -> None:
    """Maps exceptions of routes to refusals."""
    errors: dict[type[Exception], Callable[[Any], Response]] = {SandboxError: sandbox_refusal, OSError: file_refusal}
    add_error_handlers(app, errors, no_field=None, with_body_prefix=True)


def sandbox_refusal(error: SandboxError) -> Response:
    if isinstance(error, SandboxLost):
        return error_response(404, None, str(error))
    if isinstance(error, NoSuchImage):
        return error_response(422, "body.image", str(error))
    if isinstance(error, UnmetNeeds):
        return error_response(422, "body.needs", str(error))
    status = 429 if isinstance(error, OverQuota) else 503
    retry_after_s = (error.after_s or 1.0) if isinstance(error, SandboxBusy) else None
    return error_response(status, None, str(error), retry_after_s=retry_after_s)


def file_refusal(error: OSError) -> Response:
    return error_response(409, None, error.strerror or str(error), errno=error.errno or 5)


# ---- OpenAPI: what FastAPI leaves out

REFUSALS = {
    "400": "The body cannot be read",
    "401": "No valid token of this server",
    "413": "The body is too long",
    "422": "The request is wrong; `field` says where",
    "503": "The sandbox failed; with Retry-After: no box was free in time, and nothing was done",
}
"""Refusals that every route may answer."""
BUSY = "This token has as many boxes or running calls as its quota allows: nothing was done, see Retry-After"
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BYTES_IN: dict[str, Any] = {"requestBody": {"content": _BYTES, "required": True}}
BYTES_OUT: dict[int | str, dict[str, Any]] = {200: {"description": "The bytes", "content": _BYTES}}
NDJSON: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One `StreamedOutput` per line; the last line is a `StreamEnd`.",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


def complete_schema(app: FastAPI) -> None:
    complete_openapi(app, _refusals_of, (StreamedOutput, StreamEnd), error_body=SandboxErrorBody)


def _refusals_of(path: str) -> dict[str, str]:
    refusals = dict(REFUSALS)
    if path.startswith("/sessions"):
        refusals |= {"404": "No such session of this token (any more)", "429": BUSY}
    if path == "/run_code":
        refusals["429"] = BUSY
    if path.endswith(("/files", "/folder")):
        refusals |= {"409": "The file or folder could not be opened; `errno` says why"}
    return refusals
