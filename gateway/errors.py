"""Why a request about a recorded episode is refused; each is one HTTP status (`routes.py`).

CaptureError
├── Gone            410  the episode has ended, or another lease of it was given
├── NoEpisode       404  no such episode can be
├── NotNow          503  nothing to lease, no server, queue away: the same request later may work
├── Conflict        409  the episode is not in a state for this; the message says what to do first
├── TooLong         400  the context leaves the model no room to answer
└── NotRecordable   501  this model has no tokenizer or chat template that can be continued exactly

Refusals as statuses, in the words and the shape that OpenAI clients read.

What a client is told of an answer that could not be made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.gateway.wire import BadAsk, bad_ask_body, error_body
from penstock.rollout_server import EngineError
from penstock.transfer_queue import QueueError


class CaptureError(Exception):
    """Base; the message is for the client."""

    status = 500


class Gone(CaptureError):
    """The episode has ended, or its lease is lost: no more calls."""

    status = 410


class NoEpisode(CaptureError):
    """The handle names no episode."""

    status = 404


class NotNow(CaptureError):
    """The queue, the servers or this server cannot serve it now; asking again may help."""

    status = 503


class Conflict(CaptureError):
    """Something has to be done first; the message says what."""

    status = 409


class TooLong(CaptureError):
    """The messages leave no room to answer in the model's context."""

    status = 400


class NotRecordable(CaptureError):
    """The model's tokenizer, template or reward function cannot be used."""

    status = 501


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


log = logging.getLogger(__name__)


def told_of(error: Exception) -> Exception:
    """`BadAsk` where asking again cannot help, else `NotNow`."""
    if isinstance(error, QueueError):
        return NotNow(f"the queue: {error}")
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return BadAsk(".".join(map(str, first["loc"])), first["msg"], "invalid_value")
    cause = error.__cause__
    if isinstance(cause, EngineError) and not cause.retryable:
        return BadAsk("", str(cause))
    return NotNow(str(error))


def unforeseen(task: asyncio.Task[None]) -> Exception:
    """Why a call ended that did not end itself."""
    if task.cancelled():
        return NotNow("the answer was given up")
    error = task.exception()
    if error is not None:
        log.error("an answer failed here", exc_info=error)
    return NotNow(f"the answer failed: {error!r}")
