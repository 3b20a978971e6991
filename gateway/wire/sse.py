"""Server-sent events as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see life."""


def data(body: Mapping[str, Any]) -> bytes:
    """One unnamed event, as chat and completions send them."""
    return b"data: " + _plain(body) + b"\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """One event named by its ``type``, as the Responses API sends them."""
    return f"event: {body['type']}\n".encode() + data(body)


def _plain(body: Mapping[str, Any]) -> bytes:
    """ASCII only: a line separator inside a text must not end the event."""
    return json.dumps(body, separators=(",", ":")).encode()
