"""Requests and answers as they go over the wire. Unknown keys and wrong types are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.sandbox.protocol import RunResult

MAX_TIMEOUT_S = 3600.0
MAX_TEXT_CHARS = 8 << 20
MAX_ARGUMENTS = 4096


Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TimeoutS = Annotated[
    float | None,
    Field(None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, description="Null: the server's usual limit."),
]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StartRequest(Request):
    label: str = Field("", max_length=256, description="For people and for ending sessions by label.")
    ttl_s: float = Field(
        900.0, gt=0, le=86400, allow_inf_nan=False, description="Ended when nobody used it for so long."
    )
    image: str | None = Field(None, max_length=512, description="Null: the backend's default.")
    wait_s: float | None = Field(
        None, ge=0, le=120, allow_inf_nan=False, description="For a free box; at most the server's own limit."
    )


class RunRequest(Request):
    argv: list[Text] = Field(min_length=1, max_length=MAX_ARGUMENTS)
    stdin: Text = ""
    cwd: str | None = Field(None, max_length=4096, description="In the box; null: its /tmp.")
    timeout_s: TimeoutS = None


class RunPythonRequest(Request):
    code: Text
    timeout_s: TimeoutS = None


class RunShellRequest(Request):
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


class Health(BaseModel):
    sessions: int
    warm: int
    waiting: int
    max_boxes: int
    containment: str


class StreamedOutput(BaseModel):
    """A piece of output, as it comes."""

    stream: Literal["stdout", "stderr"]
    data: str


class StreamError(BaseModel):
    message: str
    lost: bool
    """The session is gone."""


class StreamEnd(BaseModel):
    """The last line: what `run` would have answered, or how the sandbox failed."""

    result: RunResult | None = None
    error: StreamError | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Any:
        if (self.result is None) == (self.error is None):
            raise ValueError("result or error")
        return self
