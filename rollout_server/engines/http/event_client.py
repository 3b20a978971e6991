"""Streamed POSTs to an engine of this machine, without a task or a future per piece of the answer.

    EventClient.post ──► a kept connection, or a new one ──► bytes of the request
    ResponseSink.begins · receives · ends  ◄── httptools ◄── bytes of the response, in the loop's own callback

An engine sends an event per token and request: what is done for each piece is what a sidecar's tokens cost. aiohttp
wakes a task for every one. Control calls, which are few, stay with it (`ChildServer.call`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import aiohttp
import httptools

from penstock.common import bearer_headers


@dataclass(frozen=True)
class EngineAddress:
    """Address of an engine: a unix socket, or a port of this machine."""

    url: str
    """``http://HOST:PORT``; with a `socket` its host is a name alone."""
    key: str = field(repr=False)
    """Bearer token of every request."""
    socket: str = ""
    keep_s: float = 0.0
    """Idle connections are kept so long; 0: none is. It must be less than the server keeps them: one that it closes
    just when we write loses a request."""

    def session(self) -> aiohttp.ClientSession:
        """A client for control calls."""
        connector: aiohttp.BaseConnector
        if self.socket:
            connector = aiohttp.UnixConnector(self.socket, limit=0, keepalive_timeout=self.keep_s)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=not self.keep_s)
        return aiohttp.ClientSession(self.url, connector=connector, headers=bearer_headers(self.key), trust_env=False)

    @property
    def host(self) -> str:
        return self.url.partition("://")[2].rstrip("/")

    def head(self, path: str) -> bytes:
        """Head of a POST of JSON, up to the number of its bytes."""
        connection = "" if self.keep_s else "Connection: close\r\n"
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n{connection}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()


class ResponseSink(Protocol):
    """Takes one response. Called by the event loop, in this order; none may raise."""

    def begins(self, status: int) -> None:
        """The head has come."""

    def receives(self, data: bytes) -> None:
        """Bytes of the body."""

    def ends(self, cause: str) -> None:
        """Called once at the end. `cause`: the reason if the response is incomplete, else empty."""


class EventClient:
    """Connections to one engine. `close` comes last."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._heads: dict[str, bytes] = {}
        self._idle: list[_EventConnection] = []
        self._open: set[_EventConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def post(self, path: str, body: bytes, reply: ResponseSink) -> StreamedPost:
        """Sends the request; `reply` gets what comes of it."""
        if path not in self._heads:
            self._heads[path] = self._address.head(path)
        exchange = StreamedPost(self._heads[path] + b"%d\r\n\r\n" % len(body) + body, reply)
        if (idle := self._take_idle()) is not None:
            idle.send(exchange)
        else:
            exchange.connecting = asyncio.get_running_loop().create_task(self._connect(exchange))
            self._connecting.add(exchange.connecting)
            exchange.connecting.add_done_callback(self._connecting.discard)
        return exchange

    async def call(self, path: str, body: bytes, timeout_s: float) -> int:
        """The status of a response whose body does not matter. Raises `OSError`."""
        reply = _StatusOnly()
        exchange = self.post(path, body, reply)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply.status
        finally:
            exchange.close()

    async def close(self) -> None:
        """Ends every connection; replies that are under way end as broken off."""
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def _connect(self, exchange: StreamedPost) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            if address.socket:
                _, connection = await loop.create_unix_connection(self._new, address.socket)
            else:
                host, _, port = address.host.rpartition(":")
                _, connection = await loop.create_connection(self._new, host.strip("[]"), int(port))
        except OSError as error:
            exchange.end(f"it cannot be reached: {error!r}")
        except asyncio.CancelledError:
            exchange.end("the client was closed")
            raise
        else:
            exchange.connecting = None
            connection.send(exchange)

    def _new(self) -> _EventConnection:
        return _EventConnection(self)

    def _take_idle(self) -> _EventConnection | None:
        """The one used last: those that wait longest may be closed by the server next."""
        oldest = time.monotonic() - self._address.keep_s
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    # what connections report ---------------------------------------------------------------------------------------
    def opened(self, connection: _EventConnection) -> None:
        self._open.add(connection)

    def finished(self, connection: _EventConnection, *, may_be_kept: bool) -> None:
        """Take note that the response of a connection is complete."""
        if may_be_kept and self._address.keep_s:
            self._idle.append(connection)
        else:
            connection.abort()

    def lost(self, connection: _EventConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _StatusOnly:
    """A `ResponseSink` of which only the status is read."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._status = 0

    def begins(self, status: int) -> None:
        self._status = status

    def receives(self, data: bytes) -> None:
        """Ignores the body."""

    def ends(self, cause: str) -> None:
        if self.status.done():
            return
        if cause:
            self.status.set_exception(ConnectionError(cause))
        else:
            self.status.set_result(self._status)


class StreamedPost:
    """One request and its response."""

    def __init__(self, request: bytes, reply: ResponseSink) -> None:
        self.request = request
        self.reply: ResponseSink | None = reply
        """None: it has ended, or was closed."""
        self.connecting: asyncio.Task[None] | None = None
        self.connection: _EventConnection | None = None

    def end(self, cause: str) -> None:
        reply, self.reply = self.reply, None
        if reply is not None:
            reply.ends(cause)

    def close(self) -> None:
        """Nothing more is reported. The connection of a response that is not whole is closed: servers abort it."""
        self.reply = None
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()


class _EventConnection(asyncio.Protocol):
    """One request at a time. Its methods without an underscore are called by asyncio, httptools and `EventClient`."""

    def __init__(self, client: EventClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: StreamedPost | None = None
        self._receives: Callable[[bytes], None] | None = None
        """Method of the current reply."""
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: StreamedPost) -> None:
        if self._transport is None or exchange.reply is None:  # lost, or closed, while it was being connected
            exchange.end("the connection was closed")
            self.abort()
            return
        self._exchange, exchange.connection, self._receives = exchange, self, exchange.reply.receives
        self._transport.write(exchange.request)

    def abort(self) -> None:
        self._receives = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio -------------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its type
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"it does not speak HTTP: {error!r}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.lost(self)
        self._end(repr(error) if error else "the connection was closed")

    # httptools -----------------------------------------------------------------------------------------------------
    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._exchange.reply is not None:
            self._exchange.reply.begins(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._receives is not None:
            self._receives(data)

    def on_message_complete(self) -> None:
        self.idle_since = time.monotonic()
        self._client.finished(self, may_be_kept=self._exchange is not None and self._parser.should_keep_alive())
        self._end("")

    def _end(self, cause: str) -> None:
        exchange, self._exchange, self._receives = self._exchange, None, None
        if exchange is not None:
            exchange.connection = None
            exchange.end(cause)
