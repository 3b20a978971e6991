"""A driver as the worker sees it, whatever it runs in. A frame is 4 bytes of length (big endian), then JSON."""

from __future__ import annotations

import asyncio
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from penstock.sandbox.protocol import SandboxError

MAX_FRAME_BYTES = 64 << 20
Tell = Callable[[str, str], None]
"""(stream, text): a piece of output, as it comes."""
_LENGTH = struct.Struct(">I")


class BoxEnded(SandboxError):
    """The driver's end of its connection closed."""


class Writer(Protocol):
    """What of asyncio's StreamWriter is needed."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Raises `ConnectionError` where the other end is gone."""


class Box(ABC):
    """A started driver. One request at a time; the owner awaits `end` whatever happened."""

    _reader: asyncio.StreamReader
    _writer: Writer

    def __init__(self) -> None:
        self._requests = 0

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def last_words(self) -> str:
        """What the driver wrote to its stderr."""

    @abstractmethod
    def new_oom_kills(self) -> int:
        """Processes of this box that ran out of memory since the last call; also after its end."""

    @abstractmethod
    async def end(self) -> None:
        """Everything in the box is gone afterwards."""

    async def request(self, command: dict[str, Any], deadline_s: float, tell: Tell | None = None) -> dict[str, Any]:
        """The driver's answer; `tell` hears what comes before it.

        Raises `BoxEnded`, or `TimeoutError` past the deadline: end the box then.
        """
        self._requests += 1
        body = json.dumps({**command, "id": self._requests}).encode("ascii")
        async with asyncio.timeout(deadline_s):
            try:
                self._writer.write(_LENGTH.pack(len(body)) + body)
                await self._writer.drain()
            except ConnectionError as error:
                raise BoxEnded("the box closed its socket") from error
            while "out" in (answer := await self._receive_answer()):
                if tell is not None:
                    tell(answer["out"], answer["data"])
        return answer

    async def _receive_answer(self) -> dict[str, Any]:
        answer = await self._receive()
        if answer.get("id") != self._requests:
            raise BoxEnded("the box broke its protocol")
        return answer

    async def _receive(self) -> dict[str, Any]:
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise BoxEnded(f"the box sent a frame of {size} bytes")
            answer = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise BoxEnded(f"the box ended ({self.last_words or 'it said nothing'})") from error
        if not isinstance(answer, dict):
            raise BoxEnded("the box broke its protocol")
        return answer
