"""Errors of recorded episodes, one HTTP status each, and their bodies in the shape that OpenAI clients read.

GatewayError
├── Gone            410  the episode has ended, or another lease of it was given
├── NoEpisode       404  the handle names no episode
├── NotNow          503  nothing to lease, no server, queue away: the same request later may work
├── UnknownModel    404  the request names a model that is not served here
├── Conflict        409  the episode is not ready for this; the message says what to do first
├── TooLong         400  the context leaves the model no room to answer
└── NotRecordable   501  this model has no tokenizer or chat template that can be continued exactly


"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.wire import InvalidRequest, error_body, invalid_request_body
from penstock.gateway.wire.types import Api
from penstock.rollout_server import BadRequest, EngineError
from penstock.transfer_queue import QueueError


class GatewayError(Exception):
    """Base; the message is for the client."""

    status = 500


class Gone(GatewayError):
    """The episode has ended, or its lease is lost: no more calls."""

    status = 410


class NoEpisode(GatewayError):
    """The handle names no episode."""

    status = 404


class UnknownModel(GatewayError):
    """The request names a model that is not served here."""

    status = 404


class NotNow(GatewayError):
    """The queue, the servers or this server cannot serve it now; asking again may help."""

    status = 503


class Conflict(GatewayError):
    """Something has to be done first; the message says what."""

    status = 409


class TooLong(GatewayError):
    """The messages leave no room to answer in the model's context."""

    status = 400


class NotRecordable(GatewayError):
    """The model's tokenizer, template or reward function cannot be used."""

    status = 501


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal_of(error: InvalidRequest | GatewayError) -> Refusal:
    """Maps an error to its HTTP response."""
    if isinstance(error, InvalidRequest):
        return Refusal(400, invalid_request_body(error))
    if isinstance(error, UnknownModel):
        return Refusal(error.status, error_body(error.status, str(error), "model", "model_not_found"))
    code = "context_length_exceeded" if isinstance(error, TooLong) else None
    headers = {"Retry-After": "1"} if isinstance(error, NotNow) else {}
    return Refusal(error.status, error_body(error.status, str(error), code=code), headers)


PREFIX = "/episodes/"


class OpenAIErrors:
    """ASGI layer: errors of the server around the gateway's routes in OpenAI's shape.

    Requests for other paths go to `app` as they are, those for episodes to `episodes`.
    """

    def __init__(self, app: ASGIApp, episodes: ASGIApp) -> None:
        self.app, self._episodes = app, episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        await self._episodes(scope, receive, _ErrorRewriter(send))


class _ErrorRewriter:
    """`send` that holds an error until it is whole, and sends it in OpenAI's shape."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._flush(self._start)

    async def _flush(self, start: Message) -> None:
        body = json.dumps(_openai_body(start["status"], self._body)).encode()
        kept = [(name, value) for name, value in start["headers"] if name not in (b"content-length", b"content-type")]
        new = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await self._send({**start, "headers": [*kept, *new]})
        await self._send({"type": "http.response.body", "body": body})


def _openai_body(status: int, body: bytes) -> Mapping[str, Any]:
    try:
        whole = json.loads(body)
        error = whole["error"]
        return whole if "type" in error else error_body(status, error["message"], error.get("field") or None)
    except (ValueError, KeyError, TypeError):
        return error_body(status, body.decode(errors="replace") or f"the request failed with status {status}")


log = logging.getLogger(__name__)


CLIENT_FIELDS: Mapping[Api, Mapping[str, str]] = {
    "chat": {"token_ids": "messages", "max_new_tokens": "max_tokens"},
    "completions": {"token_ids": "prompt", "max_new_tokens": "max_tokens"},
    "responses": {"token_ids": "input", "max_new_tokens": "max_output_tokens"},
}


def _client_field(field: str, api: Api) -> str:
    """A field of `GenerateRequest` or `Sampling` as the client's API calls it."""
    name = field.removeprefix("sampling.").partition(".")[0]
    return CLIENT_FIELDS[api].get(name, name)


def to_client_error(error: Exception, api: Api = "chat") -> Exception:
    """Maps failures to client errors: `InvalidRequest` where a retry cannot help, else `NotNow`."""
    if isinstance(error, QueueError):
        return NotNow(f"the queue: {error}")
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return InvalidRequest(_client_field(".".join(map(str, first["loc"])), api), first["msg"], "invalid_value")
    cause = error.__cause__
    if isinstance(cause, BadRequest):
        message = str(cause).removeprefix(f"{cause.field}: ")
        return InvalidRequest(_client_field(cause.field, api), message, "invalid_value")
    if isinstance(cause, EngineError) and not cause.retryable:
        return InvalidRequest("", str(cause))
    return NotNow(str(error))


def unexpected_end(task: asyncio.Task[None]) -> Exception:
    """The error of a task that ended without reporting its result."""
    if task.cancelled():
        return NotNow("the answer was cancelled")
    error = task.exception()
    if error is not None:
        log.error("an answer failed here", exc_info=error)
    return NotNow(f"the answer failed: {error!r}")
