"""Between clients and Redis: passes bytes on, and when told to, cuts connections after a random number of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

REQUEST, REPLY = "request", "reply"


class CuttingProxy:
    """Listens on a unix socket beside Redis's. A cut lands in mid-request or in mid-reply, rarely at their border."""

    def __init__(self, upstream: str, socket: Path, chance: random.Random) -> None:
        self._upstream = urlsplit(upstream).path
        self._socket = socket
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self.mean_bytes = 0
        """A new connection passes on about so many bytes, one way, before it is cut; 0: it is never cut."""
        self.cuts: Counter[str] = Counter()
        """``request`` | ``reply`` → connections cut there."""

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        except OSError:
            writer.close()
            return
        left = self._chance.expovariate(1 / self.mean_bytes) if self.mean_bytes else float("inf")
        cut = self._chance.choice([REQUEST, REPLY])
        ways = [(reader, up_writer, REQUEST), (up_reader, writer, REPLY)]
        pipes = [asyncio.create_task(self._pass_on(*way, left if way[2] == cut else float("inf"))) for way in ways]
        self._pipes.update(pipes)
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            self._pipes.difference_update(pipes)
            writer.close()
            up_writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, left: float) -> None:
        """Until one side ends, or the `left` bytes that this connection may pass this way are used up."""
        while data := await reader.read(1 << 16):
            if self.mean_bytes and len(data) > left:
                # What is flushed arrives: the other side sees the first part of a message, then the end.
                writer.write(data[: int(left)])
                await writer.drain()
                self.cuts[way] += 1
                return
            left -= len(data)
            writer.write(data)
            await writer.drain()
