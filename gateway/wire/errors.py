"""Errors in the shape that OpenAI clients read: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from penstock.gateway.wire.types import BadAsk

_TYPES = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    409: ("conflict_error", "conflict"),
    410: ("invalid_request_error", "gone"),
    413: ("invalid_request_error", "too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "overloaded"),
}
"""HTTP status → (type, code). The `openai` package raises its exceptions by status and retries 409, 429 and 5xx."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    """The field that is wrong, as the client wrote it: ``messages.0.content``."""
    code: str | None = None


class ErrorBody(BaseModel):
    """For routes to declare in OpenAPI."""

    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Body of an answer with this status; statuses that are not in the table read as 400 or 500."""
    kind, usual = _TYPES.get(status) or _TYPES[400 if status < 500 else 500]
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual}}


def bad_ask_body(error: BadAsk) -> dict[str, Any]:
    """Body of the 400 for a request that cannot be served."""
    return error_body(400, str(error), error.field or None, error.code)
