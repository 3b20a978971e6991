"""The trainer's published files over HTTP, read-only: ranges, the run's token, nothing else.

    GET /weights-00000007.delta.safetensors    Range: bytes=1048576-        206, or 200 without a range

Several servers are served at once. A file that is deleted while it is sent is sent to its end.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from penstock.rollout_server.weights.publisher import FILE_NAME

STOP_S = 2.0
"""What is being sent gets this long; a server that was cut goes on elsewhere, or later."""
PIECE_BYTES = 1 << 20
"""Read at a time, in a thread, where the event loop cannot leave the copying to the kernel (uvloop cannot)."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FileServer:
    """Serves one folder from the event loop that calls `start`, until `stop`."""

    def __init__(self, directory: Path, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._directory = Path(directory)
        self._token = token
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None
        self.url = ""
        """What others connect to, without a slash at its end; known after `start`."""

    async def start(self) -> None:
        """Raises `OSError` where the address cannot be had."""
        app = web.Application(middlewares=[self._authorised])
        app.router.add_get("/{name}", self._send)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{_url_host(self._host)}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401 before anything is looked up: without the token nobody learns which files there are."""
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="the run's token is needed: Authorization: Bearer TOKEN")
        return await handler(request)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = self._directory / name
        if not FILE_NAME.fullmatch(name) or not path.is_file():
            raise web.HTTPNotFound(text=f"{name} is not, or not any more, among the published files")
        return web.FileResponse(path, chunk_size=PIECE_BYTES)


def _url_host(host: str) -> str:
    """An address that means "all interfaces" is reached by this machine's name."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 (not a binding)
    return f"[{host}]" if ":" in host else host
