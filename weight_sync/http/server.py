"""Published files over HTTP, read-only: ranges and the run's token. The trainer runs it, and servers for their peers.

    GET  /weights-00000007.delta.safetensors   Range: bytes=1048576-     206, or 200 without a range
         … from a server that serves others, too                         303 to a peer, 503 while it must wait
    PUT  /weights-00000007.delta.safetensors                             204: that server has it now
    POST /broadcasts                                                     200, 204 or 409, see `broadcast.offer`

Serves several servers at once. A file deleted while it is being sent is sent to its end.

On a rollout server it runs in a thread with its own event loop (`PeerServer`): gigabytes for peers must not delay the
tokens that the sidecar's loop passes on.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from penstock.common import bearer_token, same_token, url_host
from penstock.weight_sync.broadcast.seats import Broadcaster, OtherWire
from penstock.weight_sync.files.file_format import PIECE_BYTES
from penstock.weight_sync.http.scheduler import AVOID, SERVES, TRAINER, TransferScheduler
from penstock.weight_sync.manifest import FILE_NAME, LOCAL_NAME

STOP_S = 2.0
"""Seconds that transfers in progress get; a server whose transfer was cut continues elsewhere, or later."""
PEER = re.compile(r"https?://[^/\s,]{1,255}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
START_S = 10.0


class FileServer:
    """Serves one folder's files of the names in `pattern`, from the event loop that calls `start`, until `stop`."""

    def __init__(
        self,
        directory: Path,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        broadcaster: Broadcaster | None = None,
        pattern: re.Pattern[str] = FILE_NAME,
        share_from_bytes: int = 1 << 20,
        will_be_there: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        """`will_be_there`: whether a file that is missing is written now, because it was asked for. Files below
        `share_from_bytes` are served at once: waiting for a turn would take longer."""
        self._directory = Path(directory)
        self._token = token
        self._host, self._port = host, port
        self._broadcaster, self._pattern = broadcaster, pattern
        self._share_from_bytes = share_from_bytes
        self._will_be_there = will_be_there
        self._turns = TransferScheduler()
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Address for other processes, without a slash at its end; known after `start`."""
        self.bytes_sent = 0
        """Bytes in complete responses."""

    async def start(self) -> None:
        """Raises `OSError` where the address cannot be had."""
        app = web.Application(middlewares=[self._authorised])
        app.router.add_get("/{name}", self._send)
        app.router.add_put("/{name}", self._note_holder)
        if self._broadcaster is not None:
            app.router.add_post("/broadcasts", self._give_places)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{url_host(self._host)}:{port}"

    async def stop(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401 before anything is looked up: without the token a client cannot learn which files there are."""
        if not same_token(bearer_token(request.headers.get("Authorization", "")), self._token):
            raise web.HTTPUnauthorized(text="the run's token is needed: Authorization: Bearer TOKEN")
        return await handler(request)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        path = self._path(request)
        asking = _peer(request)
        shared = bool(asking) and path.stat().st_size >= self._share_from_bytes
        if shared and self._turn(path, asking, request) != TRAINER:
            raise web.HTTPServiceUnavailable(text="another server is fetching it", headers={"Retry-After": "1"})
        return _CountedResponse(self, path, asking)

    def _turn(self, path: Path, asking: str, request: web.Request) -> str | None:
        avoid = set(request.headers.get(AVOID, "").split(","))
        source = self._turns.ask(path.name, path.stat().st_size, asking, avoid)
        if source:
            raise web.HTTPSeeOther(source, text="another server has it, under its checksum's name")
        return source

    async def _note_holder(self, request: web.Request) -> web.Response:
        path = self._path(request)
        if not (holder := _peer(request)):
            raise web.HTTPBadRequest(text=f"{SERVES}: the URL of the server that has it")
        self._turns.has(path.name, holder)
        return web.Response(status=204)

    async def _give_places(self, request: web.Request) -> web.Response:
        assert self._broadcaster is not None
        transport = request.transport
        try:
            body = await request.json()
            offer = await self._broadcaster.park(
                int(body["count"]),
                str(body["wire"]),
                lambda: transport is not None and not transport.is_closing(),
                seat=str(body.get("seat", "")),
            )
        except OtherWire as error:
            raise web.HTTPConflict(text=str(error)) from error
        except (ValueError, TypeError, KeyError) as error:
            raise web.HTTPBadRequest(text=f"this is not a server that waits for a broadcast: {error!r}") from error
        return web.Response(status=204) if offer is None else web.json_response(offer.as_dict())

    def _path(self, request: web.Request) -> Path:
        name = request.match_info["name"]
        path = self._directory / name
        published = self._pattern.fullmatch(name) is not None
        if published and not path.is_file() and self._will_be_there(name):
            raise web.HTTPServiceUnavailable(text="it is being written", headers={"Retry-After": "1"})
        if not published or not path.is_file():
            raise web.HTTPNotFound(text=f"{name} is not, or not any more, among the published files")
        return path

    def cut_off(self, name: str, asking: str) -> None:
        """An answer broke off: the next server may have the turn. After a whole one, once this one has verified it."""
        if asking:
            self._turns.gave_up(name, asking)


class _CountedResponse(web.FileResponse):
    """A file; whatever ends it, its server hears."""

    def __init__(self, server: FileServer, path: Path, asking: str) -> None:
        super().__init__(path, chunk_size=PIECE_BYTES)
        self._server, self._name, self._asking = server, path.name, asking

    async def prepare(self, request: web.BaseRequest) -> object:  # type: ignore[override]
        try:
            writer = await super().prepare(request)
        except BaseException:
            self._server.cut_off(self._name, self._asking)
            raise
        self._server.bytes_sent += self.content_length or 0
        return writer


def _peer(request: web.Request) -> str:
    """The URL that the asking server serves under; empty if it does not, or if it is not a URL."""
    url = request.headers.get(SERVES, "")
    return url if PEER.fullmatch(url) else ""


class PeerServer:
    """`start`, then `stop`; whole, verified files of `directory` only."""

    def __init__(self, directory: Path, token: str, host: str) -> None:
        self._directory, self._token, self._host = directory, token, host
        # Not uvloop, whatever the process runs: this one leaves the copying to the kernel.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights for peers", daemon=True)
        self._files: FileServer | None = None

    def start(self) -> str:
        """The URL that others find it under. Blocks. Raises `OSError` where the address cannot be had."""
        self._files = FileServer(self._directory, self._token, self._host, pattern=LOCAL_NAME)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._files.start(), self._loop).result(START_S)
        return self._files.url

    def stop(self) -> None:
        """Cuts off who is being sent something, after `STOP_S`. Blocks."""
        if self._files is not None:
            asyncio.run_coroutine_threadsafe(self._files.stop(), self._loop).result(STOP_S + START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()
