"""Models lists, errors, and server-sent events of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.gateway.wire.types import SampledToken


class Shape(BaseModel):
    """Base of answers' OpenAPI models: no further fields."""

    model_config = ConfigDict(extra="forbid")


def model_body(model: str, **more: Any) -> dict[str, Any]:
    """One model. `more` are further fields, such as ``max_model_len`` and ``version``; clients keep and ignore them."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "penstock", **more}


def model_list_body(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": models}


_TYPES = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", None),
    409: ("conflict_error", "conflict"),
    410: ("invalid_request_error", "gone"),
    413: ("invalid_request_error", "too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "overloaded"),
}
"""HTTP status → (type, code). The `openai` package raises its exceptions by status and retries 409, 429 and 5xx."""


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None = None
    """The wrong field, as the client wrote it: ``messages.0.content``."""
    code: str | None = None


class OpenAIErrorBody(BaseModel):
    """``{"error": {"message", "type", "param", "code"}}``, the shape that OpenAI clients read."""

    error: OpenAIError


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Body of an error; statuses that are not in the table are treated as 400 or 500."""
    kind, usual = _TYPES.get(status) or _TYPES[400 if status < 500 else 500]
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


def token_logprobs(tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
    """`top_logprobs` is empty: only the sampled token's log-probability is known."""
    return [{"token": one.text, "bytes": list(one.raw), "logprob": one.logprob, "top_logprobs": []} for one in tokens]


SSE_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies keep the connection open."""


def sse_data(body: Mapping[str, Any]) -> bytes:
    """One unnamed event, as chat and completions send them."""
    # ASCII only: a line separator in a text must not end the event.
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def sse_event(body: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event named by its ``type``, as in the Responses API."""
    return f"event: {body['type']}\n".encode() + sse_data(body)
