"""What a client is told of an answer that could not be made."""

from __future__ import annotations

import asyncio
import logging

from pydantic import ValidationError

from penstock.gateway.errors import NotNow
from penstock.gateway.wire import BadAsk
from penstock.rollout_server import EngineError
from penstock.transfer_queue import QueueError

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
