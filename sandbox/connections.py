"""Connections that programs in a box make to its forwarded port, as sockets of this process.

    box's program ──► driver ──frames──► BoxConnections ──socket pair──► the accepting code

The frames are those of `inside/forward.py`. Each connection has its own window in both directions.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.common import cancel_and_wait
from penstock.sandbox.inside.forward import CHUNK_BYTES, WINDOW_BYTES
from penstock.sandbox.protocol import Accept, SandboxError

MAX_OPEN = 1024
"""Limit of one run's connections. The driver holds far fewer open."""
SendFrame = Callable[[dict[str, Any]], Awaitable[None]]


class BoxConnection:
    """One connection; `run` is its task."""

    def __init__(self, number: int, send: SendFrame) -> None:
        self.number = number
        self._send = send
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Chunks from the program; None: nothing follows."""
        self._room = WINDOW_BYTES
        """Bytes that may be sent to the program now."""
        self._buffered_bytes = 0
        """Bytes from the program that were not passed on yet."""
        self._ended = False
        """The program sends nothing more."""
        self._more_room = asyncio.Event()

    def take(self, frame: Mapping[str, Any]) -> None:
        """Raises `ValueError`, `TypeError` where the driver would not send it."""
        data, end = base64.b64decode(frame.get("data", ""), validate=True), bool(frame.get("end"))
        self._buffered_bytes += len(data)
        if self._buffered_bytes > WINDOW_BYTES or (self._ended and (data or end)):
            raise ValueError("more than its window, or more after its end")
        if data:
            self._incoming.put_nowait(data)
        if end:
            self._ended = True
            self._incoming.put_nowait(None)
        self._room += int(frame.get("ack", 0))
        self._more_room.set()

    async def run(self, ours: socket.socket) -> None:
        """Until one side has closed it. Not by asyncio's streams: where the other end closes before it has read all,
        these drop an answer that it has sent already."""
        passing_on = asyncio.create_task(self._pass_on(ours))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await self._read(ours):
                    self._room -= len(data)
                    await self._send({"conn": self.number, "data": base64.b64encode(data).decode("ascii")})
        finally:
            await cancel_and_wait([passing_on])
        await self._send({"conn": self.number, "gone": True})

    async def _read(self, ours: socket.socket) -> bytes:
        while self._room <= 0:
            self._more_room.clear()
            await self._more_room.wait()
        return await asyncio.get_running_loop().sock_recv(ours, min(CHUNK_BYTES, self._room))

    async def _pass_on(self, ours: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while (data := await self._incoming.get()) is not None:
                await asyncio.get_running_loop().sock_sendall(ours, data)
                self._buffered_bytes -= len(data)
                await self._send({"conn": self.number, "ack": len(data)})
            ours.shutdown(socket.SHUT_WR)


class BoxConnections:
    """The connections of one run; `close` ends them with it."""

    def __init__(self, send: SendFrame, accept: Accept) -> None:
        self._send, self._accept = send, accept
        self._open: dict[int, tuple[BoxConnection, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks of connections that the program has closed."""
        self._newest = 0

    def take(self, frame: Mapping[str, Any]) -> None:
        """A frame of the driver's. Raises `SandboxError`: where a box can send frames itself, it may forge them."""
        try:
            self._take(int(frame["conn"]), frame)
        except (ValueError, TypeError, OverflowError) as error:
            raise SandboxError(f"the box broke its protocol: {error}") from error

    def _take(self, number: int, frame: Mapping[str, Any]) -> None:
        if frame.get("gone"):
            self._forget(number)
            return
        if number > self._newest:
            if len(self._open) >= MAX_OPEN:
                raise ValueError(f"more than {MAX_OPEN} open connections")
            self._newest = number
            self._open[number] = self._begin(number)
        if number in self._open:  # else it was closed here, which the driver did not know yet
            self._open[number][0].take(frame)

    async def close(self) -> None:
        await cancel_and_wait([*(task for _, task in self._open.values()), *self._leaving])
        self._open.clear()

    def _begin(self, number: int) -> tuple[BoxConnection, asyncio.Task[None]]:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        connection = BoxConnection(number, self._send)
        task = asyncio.create_task(connection.run(ours), name=f"connection {number} of a box")
        task.add_done_callback(lambda ended: self._ended(number, ended, ours))
        self._accept(theirs)
        return connection, task

    def _ended(self, number: int, task: asyncio.Task[None], ours: socket.socket) -> None:
        ours.close()
        self._open.pop(number, None)
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()  # the box is gone: its request says so

    def _forget(self, number: int) -> None:
        """The program has closed it: what it was sent is not wanted any more."""
        if number in self._open:
            _, task = self._open.pop(number)
            self._leaving.add(task)
            task.cancel()
