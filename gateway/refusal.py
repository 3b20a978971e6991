"""Refusals as statuses, in the words and the shape that OpenAI clients read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.errors import CaptureError, NotNow, TooLong
from penstock.gateway.wire import BadAsk, bad_ask_body, error_body


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal_of(error: BadAsk | CaptureError) -> Refusal:
    """What a client is answered in place of an answer."""
    if isinstance(error, BadAsk):
        return Refusal(400, bad_ask_body(error))
    code = "context_length_exceeded" if isinstance(error, TooLong) else None
    headers = {"Retry-After": "1"} if isinstance(error, NotNow) else {}
    return Refusal(error.status, error_body(error.status, str(error), code=code), headers)
