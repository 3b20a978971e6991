"""The session of an episode whose agent is a program in a box, and the API that the program reaches.

    program ──connection of its box──► EpisodeEndpoint (key, limits) ──► CommandSession ──► journal, segments

Nothing listens on this machine: an endpoint is served on the connections that one box hands out, and has one episode
behind it. `CommandSession.stop` asks for the program's end, with its cause.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import socket
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.agent_loops import InfraFailure
from penstock.common import LimitBody, RequireToken, opens, same_token
from penstock.common.http_connections import HttpConnections
from penstock.gateway.errors import PREFIX, ClientErrors, GatewayError, Gone, NoEpisode, NotNow, TooLong
from penstock.gateway.prefix_tree import PrefixMatch, Turn
from penstock.gateway.recorded_loop import infra_failure_of
from penstock.gateway.requests import PendingAnswer
from penstock.gateway.routes import MAX_BODY_BYTES, make_client_router
from penstock.gateway.session import GatewaySession, Reservation
from penstock.gateway.sessions import ApiKeyHeader
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest

BEYOND_BUDGET = 8
"""Requests that a program may make once its budget is used up: each gets an empty answer, the next one ends it."""


class CommandSession(GatewaySession):
    """Knows what went wrong with the program's requests."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.stop = asyncio.Event()
        """Set where the program is to end now."""
        self.cause = ""
        """Why; empty if it was not asked to end."""
        self.diverged = False
        """The second run of the program asks for something else than the first one."""
        self.failure: InfraFailure | None = None
        """The first failure of the infrastructure: it ends the episode, whatever the program makes of it."""
        self.refusals: list[str] = []
        """Causes of the newest requests that were refused as wrong, oldest first."""
        self.last_refusal = ""
        """Refusal of the last request; empty if it was answered."""
        self.too_long = False
        """The last request left the model no room to answer."""
        self.requests = 0
        """Number of requests of any kind."""
        self.closing = False
        """The program has ended: what is cancelled now is not a failure."""
        self._beyond_budget = 0

    async def answer(self, request: CompletionRequest, *, retried: bool = False) -> PendingAnswer:
        if self.facts.get("truncated") and not self.replay.left:  # replayed requests came before the budget's end
            self._beyond_budget += 1
            if self._beyond_budget > BEYOND_BUDGET:
                self.end_program(f"it kept asking: {BEYOND_BUDGET} times since its budget was used up")
        try:
            pending = await super().answer(request, retried=retried)
        except (InvalidRequest, GatewayError) as error:
            self.note_error(error)
            raise
        self.last_refusal, self.too_long = "", False
        return pending

    def end_program(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.stop.set()

    def note_error(self, error: Exception) -> None:
        """An error that the program was given."""
        if self.closing or self.diverged or not isinstance(error, InvalidRequest | GatewayError):
            return
        self.too_long = isinstance(error, TooLong)
        if isinstance(error, NotNow | Gone):
            self.failure = self.failure or infra_failure_of(error, self)
            self.end_program(str(error))

    def note_refusal(self, cause: str) -> None:
        self.last_refusal = cause
        self.refusals = [*self.refusals, cause][-20:]

    def _known(self, match: PrefixMatch, key: str, retried: bool) -> list[Turn]:
        """A program that takes another way than before the crash is run afresh at once, not after its end."""
        known = super()._known(match, key, retried)
        if not known and self.replay.left and not self.in_flight:
            self.diverged = True
            self.end_program("its second run asks for something else than its first")
            raise Gone(self.cause)
        return known

    def _close(self, call: PendingAnswer, reservation: Reservation, error: Exception | None) -> None:
        if error is not None and not call.ended:
            self.note_error(error)
        super()._close(call, reservation, error)


class EpisodeEndpoint:
    """The routes of one episode's API. `accept` takes connections; `close` ends them."""

    def __init__(self, session: CommandSession, handle: str, *, max_requests: int, max_bytes: int) -> None:
        """Beyond `max_requests` requests or connections, or `max_bytes` of bodies, the program is ended."""
        self.key = secrets.token_hex(32)
        """Opens this endpoint and nothing else, for as long as it is served."""
        self._session, self._handle = session, handle
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._bytes_left = max_bytes
        self._connections = 0
        closed = RequireToken(client_app(), opens("", further=self._opens))
        self._http = HttpConnections(
            self._counted(ClientErrors(closed, ApiKeyHeader(LimitBody(closed, MAX_BODY_BYTES))))
        )

    def accept(self, connection: socket.socket) -> None:
        self._connections += 1
        if self._connections > self._max_requests:
            self._session.end_program(f"it made more than {self._max_requests} connections")
        self._http.accept(connection)

    async def close(self) -> None:
        await self._http.close()

    def urls(self, port: int) -> tuple[str, str]:
        """(base URL of OpenAI's clients, of Anthropic's) by the box's own port."""
        episode = f"http://127.0.0.1:{port}{PREFIX}{self._handle}"
        return f"{episode}/v1", episode

    def _opens(self, path: str, token: str) -> bool:
        return path.startswith(f"{PREFIX}{self._handle}/v1/") and same_token(token, self.key)

    def find(self, handle: str) -> GatewaySession:
        """Raises `NoEpisode` unless `handle` is this endpoint's own."""
        if handle != self._handle:
            raise NoEpisode("this is the endpoint of another episode")
        return self._session

    @property
    def version(self) -> int:
        return self._session.lease.min_version

    def _counted(self, app: ASGIApp) -> ASGIApp:
        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            async def counted_receive() -> Message:
                message = await receive()
                self._bytes_left -= len(message.get("body", b""))
                if self._bytes_left < 0:
                    self._session.end_program(f"its requests had more than {self._max_bytes} bytes")
                return message

            self._session.requests += 1
            if self._session.requests > self._max_requests:
                self._session.end_program(f"it made more than {self._max_requests} requests")
            _ASKED.set(self)
            await app(scope, counted_receive, _RefusalRecorder(scope, send, self._session))

        return count


_ASKED: ContextVar[EpisodeEndpoint] = ContextVar("asked")
"""The session whose request this task answers: each request has a separate task."""


@functools.cache
def client_app() -> FastAPI:
    """The routes of all endpoints of this process: making them takes longer than an endpoint may hold its worker."""

    async def find(handle: str) -> GatewaySession:
        return _ASKED.get().find(handle)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(make_client_router(find, lambda: _ASKED.get().version))
    return app


class _RefusalRecorder:
    """`send` that records in the session why a posted request was refused, by whatever layer."""

    def __init__(self, scope: Scope, send: Send, session: CommandSession) -> None:
        self._send, self._session = send, session
        self._posted = scope.get("method") == "POST"
        self._path = str(scope.get("path", ""))
        self._status = 0
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status >= 400:  # the rest of a body that is refused is not read
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        elif 400 <= self._status < 500 and self._posted:
            self._body = (self._body + message.get("body", b""))[:4000]
            if not message.get("more_body"):
                try:  # in the shape of either API
                    cause = str(json.loads(self._body)["error"]["message"])
                except (ValueError, KeyError, TypeError):
                    cause = self._body.decode("utf-8", "replace")
                route = "/v1/" + self._path.partition("/v1/")[2] if "/v1/" in self._path else self._path[:80]
                self._session.note_refusal(f"{route} {self._status}: {cause}")
        await self._send(message)
