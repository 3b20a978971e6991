"""An HTTP app on a socket, by uvicorn, from start to stop.

async with HttpServer(app, listen(host, port)) as server:    next to other work, in this event loop
    print(server.url)

await serve(app, listen(host, port), on_ready=print)         in a process that does nothing else
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from penstock.common.address import reachable_host
from penstock.common.concurrency import cancel_and_wait

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: none sends a request into one that is being closed."""
STOP_S = 5.0
"""Requests in progress when a server stops may take this long."""
DEADLINE_S = 60.0
"""Longest time of the whole stop."""


class ServerFailed(Exception):
    """The app did not start; uvicorn has logged its traceback."""


def listen(host: str, port: int, *, ports: int = 1) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        ports: how many ports are tried, from `port` on.

    Raises:
        OSError: with the cause of the last port tried and what to do; `errno` is the system's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tried in range(port, min(port + ports, 65536)) if port else (0,):
        try:
            return socket.create_server((host, tried), family=family, backlog=1024)
        except OSError as error:
            cause = error
    which = f"port {port}" if ports == 1 or not port else f"ports {port} to {port + ports - 1}"
    what = "in use" if cause.errno == errno.EADDRINUSE else os.strerror(cause.errno) if cause.errno else str(cause)
    raise OSError(cause.errno, f"{which} on {host}: {what}; choose another, or 0 for a free one") from cause


def url_host(host: str) -> str:
    """`host` as others connect to it, see `reachable_host`; brackets around IPv6."""
    host = reachable_host(host)
    return f"[{host}]" if ":" in host else host


def url_of(listener: socket.socket, host: str | None = None) -> str:
    """``http://HOST:PORT`` of a listening socket, without a slash; `host` in place of the address it is bound to."""
    bound, port = listener.getsockname()[:2]
    return f"http://{url_host(host or bound)}:{port}"


class HttpServer:
    """uvicorn on a socket that already listens, inside this event loop.

    Requests are accepted by the kernel from the beginning, and answered once `start` has returned. Signals are left to
    the caller unless `signals` is set.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        stop_s: float = STOP_S,
        deadline_s: float = DEADLINE_S,
        signals: bool = False,
        **settings: Any,
    ) -> None:
        """Args:
        listener: see `listen`; closed by `stop`.
        stop_s: how long requests in progress may take when the server stops; then they are cancelled.
        deadline_s: how long the whole stop may take, the end of the app's lifespan included.
        signals: SIGTERM and SIGINT stop the server, and are raised again after that.
        settings: further ones of `uvicorn.Config`.
        """
        self.listener = listener
        self.url = url_of(listener)
        self._deadline_s = deadline_s
        chosen = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "on", **settings}
        chosen["timeout_graceful_shutdown"] = stop_s  # an int by its type only
        self._server = _Server(uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_S, **chosen), signals)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are answered. Raises `ServerFailed` where the app's lifespan failed."""
        self._task = asyncio.create_task(self._server.run_on(self.listener), name="http server")
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            ready.cancel()

    async def wait(self) -> None:
        """Returns when the server has ended, by `stop` or a signal. Cancelling this leaves it running."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Lets requests in progress end, then the app, within the deadline; a second call does nothing."""
        self._server.should_exit = True
        if self._task is not None:
            task, self._task = self._task, None
            await cancel_and_wait([task], timeout_s=self._deadline_s)
        self.listener.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def serve(
    app: ASGIApp, listener: socket.socket, *, on_ready: Callable[[str], None] | None = None, **settings: Any
) -> None:
    """Serves until cancelled or stopped by SIGTERM or SIGINT; for a process that does nothing else.

    Args:
        on_ready: gets the URL once requests are answered.
        settings: those of `HttpServer`.

    Raises `ServerFailed` where the app did not start.
    """
    async with HttpServer(app, listener, **{"signals": True, **settings}) as server:
        if on_ready is not None:
            on_ready(server.url)
        await server.wait()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, signals: bool) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._signals = signals

    async def run_on(self, listener: socket.socket) -> None:
        try:
            await self.serve(sockets=[listener])
        except SystemExit as error:  # uvicorn's end of a process whose app does not start; it would end the loop
            raise ServerFailed("the app did not start; its log says why") from error
        if not self.started:  # what older ones do instead
            raise ServerFailed("the app did not start; its log says why")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield
