"""An HTTP app on connections that others have accepted.

Clients may be hostile, so the parser is h11: it is strict, and its work per byte is bounded once `BoundedConnection`
counts small pieces.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from penstock.common.concurrency import cancel_and_wait
from penstock.common.http_server import KEEP_ALIVE_S


class BoundedConnection(h11.Connection):
    """Refuses a body that comes in very many small pieces."""

    _small = 0

    def next_event(self) -> Any:
        """Raises `h11.RemoteProtocolError`."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small = 0
        elif isinstance(event, h11.Data) and len(event.data) < 256:
            self._small += 1
            # Each costs the event loop as much as a large one.
            if self._small > 1024:
                raise h11.RemoteProtocolError("a body in pieces too small")
        return event


class BoundedProtocol(H11Protocol):
    """uvicorn's, with `BoundedConnection`."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, {})
        self.conn = BoundedConnection(h11.SERVER)


class HttpConnections:
    """uvicorn on connections that others have accepted: nothing listens. `close` ends them all."""

    def __init__(self, app: ASGIApp) -> None:
        self._config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
        )
        self._config.load()
        self._state = ServerState()
        self._starting: set[asyncio.Task[Any]] = set()

    def accept(self, connection: socket.socket) -> None:
        """Serves `connection`, a stream socket, and owns it."""
        task = asyncio.create_task(self._serve(connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: BoundedProtocol(self._config, self._state), connection)
        except BaseException:
            connection.close()
            raise

    async def close(self) -> None:
        """Cancels requests in progress."""
        await cancel_and_wait(self._starting)
        for protocol in list(self._state.connections):
            protocol.transport.abort()
        await cancel_and_wait(list(self._state.tasks))
