"""Passes requests on to the sidecar: what a process beside it gets on its connections and does not answer itself.

All processes of a sidecar take connections of one port, and a client may ask for any route on any of them. Episodes,
control, metrics and refusals have one place, the sidecar; it checks the token of each of these requests itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import aiohttp
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from penstock.common import cancel_and_wait, error_response

CONNECT_S = 10.0
OF_CONNECTIONS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"}
"""Headers that hold for one connection alone."""


class SidecarProxy:
    """An ASGI app. `close` comes last; what it passes on has the sidecar's deadlines."""

    def __init__(self, socket: str) -> None:
        """`socket`: unix socket on which the sidecar listens."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.UnixConnector(socket, limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, trust_env=False)

    async def close(self) -> None:
        await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a request of type {scope['type']} cannot be passed on")
        client = _Client(receive)
        passing = asyncio.create_task(self._pass(scope, client, send))
        client.on_gone = passing.cancel
        try:
            await asyncio.wait({passing})
        finally:
            await cancel_and_wait([passing, *client.watches])
        if not passing.cancelled():
            passing.result()

    async def _pass(self, scope: Scope, client: _Client, send: Send) -> None:
        begun = False
        try:
            async with self._http.request(
                scope["method"],
                URL(f"http://sidecar{_target(scope)}", encoded=True),
                headers=[pair for pair in _text(scope["headers"]) if pair[0] not in ("host", "transfer-encoding")],
                data=client.body(_has_body(scope)),
                allow_redirects=False,
            ) as response:
                begun = True
                headers = [(name.lower(), value) for name, value in response.raw_headers]
                headers = [pair for pair in headers if pair[0] not in OF_CONNECTIONS]
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for piece in response.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError as error:
            if begun:
                raise  # the client sees that the answer broke off
            refused = client.refused or HTTPException(502, f"the sidecar does not answer: {error!r}")
            await _send_refusal(refused, send)


class _Client:
    """Who asks: the body, and after it the end of the connection, which calls `on_gone`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.on_gone: Callable[[], object] = lambda: None
        self.watches: list[asyncio.Task[None]] = []
        self.refused: HTTPException | None = None
        """Of a body that this process does not take."""

    def body(self, has_one: bool) -> AsyncGenerator[bytes] | None:
        """None where there is none to be sent."""
        if has_one:
            return self._body()
        self._watch()
        return None

    async def _body(self) -> AsyncGenerator[bytes]:
        more = True
        while more:
            message = await self._next()
            if message["type"] == "http.disconnect":
                self.on_gone()
                return
            more = message.get("more_body", False)
            if piece := message.get("body"):
                yield piece
        self._watch()

    async def _next(self) -> Message:
        try:
            return await self._receive()
        except HTTPException as error:
            self.refused = error
            raise

    def _watch(self) -> None:
        self.watches.append(asyncio.create_task(self._until_gone()))

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.on_gone()


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")


def _text(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


async def _send_refusal(error: HTTPException, send: Send) -> None:
    response = error_response(error.status_code, "", error.detail)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})
