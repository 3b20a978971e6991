"""A box with a driver inside, and the frame protocol that it speaks over any connection.

A frame is 4 bytes of length (big endian), then JSON.
"""

from __future__ import annotations

import asyncio
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from penstock.common import cancel_and_wait
from penstock.sandbox.connections import BoxConnections
from penstock.sandbox.protocol import Accept, SandboxError

MAX_FRAME_BYTES = 64 << 20
OnOutput = Callable[[str, str], None]
"""(stream, text): a piece of output, as it comes."""
_LENGTH = struct.Struct(">I")


class BoxEnded(SandboxError):
    """The driver's end of its connection closed."""


class Writer(Protocol):
    """The part of asyncio's StreamWriter that a box needs."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Raises `ConnectionError` where the other end is gone."""


class Box(ABC):
    """A started driver. One request at a time; the owner awaits `end` whatever happened."""

    _reader: asyncio.StreamReader
    _writer: Writer

    def __init__(self) -> None:
        self._requests = 0
        self._oom_kills = 0
        """Processes of this box that ran out of memory so far, as its driver or its cgroup counts them."""
        self._oom_kills_seen = 0
        self.port: int | None = None
        """Port of the box's loopback; set once a port was opened for served runs."""

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def stderr_tail(self) -> str:
        """The end of the driver's stderr."""

    @property
    def broken_limit(self) -> str | None:
        """A limit for which the whole box was ended."""
        return None

    def new_oom_kills(self) -> int:
        """Processes of this box that ran out of memory since the last call; also after its end."""
        new, self._oom_kills_seen = self._oom_kills - self._oom_kills_seen, self._oom_kills
        return new

    @abstractmethod
    async def end(self) -> None:
        """Everything in the box is gone afterwards."""

    async def request(
        self, command: dict[str, Any], deadline_s: float, on_output: OnOutput | None = None
    ) -> dict[str, Any]:
        """The driver's answer; `on_output` is called with the output that arrives before it.

        Raises `BoxEnded`, or `TimeoutError` past the deadline: end the box then.
        """
        self._requests += 1
        async with asyncio.timeout(deadline_s):
            await self._send({**command, "id": self._requests})
            while "out" in (answer := self._answer(await self._receive())):
                if on_output is not None:
                    on_output(answer["out"], answer["data"])
        return answer

    async def request_served(
        self, command: dict[str, Any], deadline_s: float, accept: Accept, stop: asyncio.Event | None
    ) -> dict[str, Any]:
        """The same for a served run: its connections go to `accept`, and are closed when the answer is here."""
        self._requests += 1
        connections = BoxConnections(self._send, accept)
        stopping = asyncio.create_task(self._stop_after(stop))
        try:
            async with asyncio.timeout(deadline_s):
                await self._send({**command, "id": self._requests})
                while "conn" in (frame := await self._receive()):
                    connections.take(frame)
        finally:
            await cancel_and_wait([stopping])
            await connections.close()
        return self._answer(frame)

    async def _stop_after(self, stop: asyncio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
            await self._send({"stop": True})

    async def _send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode("ascii")
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
        except ConnectionError as error:
            raise BoxEnded("the box closed its socket") from error

    def _answer(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame.get("id") != self._requests:
            raise BoxEnded("the box broke its protocol")
        return frame

    async def _receive(self) -> dict[str, Any]:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise BoxEnded(f"the box sent a frame of {size} bytes")
            answer = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise BoxEnded(f"the box ended ({self.stderr_tail or 'it said nothing'})") from error
        if not isinstance(answer, dict):
            raise BoxEnded("the box broke its protocol")
        return answer
