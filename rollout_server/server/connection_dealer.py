"""A rollout server's port where several processes answer: one accepts, and deals the connections out.

    port        accept ──► the process with the fewest connections, this one included
    unix socket accept ──► this one: what the others pass on (`sidecar_proxy`)

One listening socket, so a port that is taken is an error as ever, and a killed process loses the connections that it
had but none that waits to be accepted. With SO_REUSEPORT a second run on this port would share it unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from starlette.types import ASGIApp

from penstock.common import HttpConnections, cancel_and_wait
from penstock.rollout_server.server.answer_processes import AnswerProcesses

logger = logging.getLogger(__name__)
ACCEPT_AGAIN_S = 0.5
"""After one that failed, for want of descriptors mostly."""


class ConnectionDealer:
    """Takes the place of an `HttpServer`: `start` comes first, `stop` last."""

    def __init__(
        self, app: ASGIApp, port: socket.socket, inner: socket.socket, beside: AnswerProcesses, *, stop_s: float
    ) -> None:
        """Args:
        port, inner: listening; both are closed by `stop`.
        stop_s: how long requests in progress may take then.
        """
        self._port, self._inner, self._beside, self._stop_s = port, inner, beside, stop_s
        self._own = HttpConnections(app, hostile=False)
        self._passed_on = HttpConnections(app, hostile=False)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connections are accepted from now on."""
        for listener, take in ((self._port, self._deal), (self._inner, self._passed_on.accept)):
            listener.setblocking(False)
            self._tasks.append(asyncio.create_task(_accept(listener, take), name="accept connections"))

    async def wait(self) -> None:
        """Returns when it has been stopped; raises what ended it before."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._tasks))

    async def stop(self) -> None:
        """Lets requests in progress end."""
        await cancel_and_wait(self._tasks)
        self._port.close()
        self._inner.close()
        await asyncio.gather(self._own.close(self._stop_s), self._passed_on.close(self._stop_s))

    def _deal(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._beside.hand_over(connection, self._own.count):
            self._own.accept(connection)


async def _accept(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
            take(connection)
        except OSError as error:
            logger.warning("no connection accepted: %s", error)
            await asyncio.sleep(ACCEPT_AGAIN_S)
