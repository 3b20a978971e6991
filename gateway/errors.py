"""Errors of recorded episodes, one HTTP status each, and their bodies in the shape that the client reads."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import header
from penstock.gateway.wire.types import Api, InvalidRequest
from penstock.gateway.wire.wires import ANTHROPIC_ERRORS, OPENAI_ERRORS, WIRES, ErrorFormat, wire_at
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


class NoResponse(GatewayError):
    """The id names no stored response of this episode."""

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


def refusal_of(error: InvalidRequest | GatewayError, errors: ErrorFormat = OPENAI_ERRORS) -> Refusal:
    """Maps an error to its HTTP response."""
    if isinstance(error, InvalidRequest):
        return Refusal(400, errors.body(400, str(error), error.field or None, error.code))
    if isinstance(error, UnknownModel):
        return Refusal(error.status, errors.body(error.status, str(error), "model", "model_not_found"))
    code = "context_length_exceeded" if isinstance(error, TooLong) else None
    headers = {"Retry-After": "1"} if isinstance(error, NotNow) else {}
    return Refusal(error.status, errors.body(error.status, str(error), code=code), headers)


PREFIX = "/episodes/"


def errors_for(scope: Scope) -> ErrorFormat:
    """The format that the client of this request reads: by its route, if it is one of all APIs by its headers."""
    wire = wire_at(scope["path"].removeprefix(PREFIX).partition("/v1/")[2])
    if wire is not None:
        return wire.errors
    # All clients of Anthropic's API send this header.
    return ANTHROPIC_ERRORS if header(scope, b"anthropic-version") else OPENAI_ERRORS


class ClientErrors:
    """ASGI layer: errors of the server around the gateway's routes in the shape that their client reads.

    Requests for other paths go to `app` as they are, those for episodes to `episodes`.
    """

    def __init__(self, app: ASGIApp, episodes: ASGIApp) -> None:
        self.app, self._episodes = app, episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        await self._episodes(scope, receive, _ErrorRewriter(send, errors_for(scope)))


class _ErrorRewriter:
    """`send` that holds an error until it is whole, and sends it in the client's shape. Each answer has an id."""

    def __init__(self, send: Send, errors: ErrorFormat) -> None:
        self._send, self._errors = send, errors
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            name, request_id = self._errors.request_id_header, f"req_{uuid.uuid4().hex}"
            message = {**message, "headers": [*message["headers"], (name.encode(), request_id.encode())]}
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = json.dumps(self._rewritten(self._start["status"])).encode()
        replaced = {b"content-length": str(len(body)).encode(), b"content-type": b"application/json"}
        others = [one for one in self._start["headers"] if one[0] not in replaced]
        await self._send({**self._start, "headers": [*others, *replaced.items()]})
        await self._send({"type": "http.response.body", "body": body})

    def _rewritten(self, status: int) -> Mapping[str, Any]:
        try:
            whole: Mapping[str, Any] = json.loads(self._body)
            error = whole["error"]
            return whole if "type" in error else self._errors.body(status, error["message"], error.get("field") or None)
        except (ValueError, KeyError, TypeError):
            text = self._body.decode(errors="replace") or f"the request failed with status {status}"
            return self._errors.body(status, text)


log = logging.getLogger(__name__)


def _client_field(field: str, api: Api) -> str:
    """A field of `GenerateRequest` or `Sampling` as the client's API calls it."""
    name = field.removeprefix("sampling.").partition(".")[0]
    return WIRES[api].client_fields.get(name, name)


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
        if cause.field == "token_ids" and "no room" in message:  # a worker knows no limit: the engine says it first
            return TooLong(message)
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
