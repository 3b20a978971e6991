"""What stands between a trainer that serves weights and a server that fetches them, misbehaving on order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

PIECE_BYTES = 4096


class CuttingProxy:
    """Hands connections on to `target`; the first of them only for as many bytes of body as `cuts` says."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target = urlsplit(target)
        self._cuts = cuts
        self.ranges: list[int] = []
        """Where each request asked to begin."""
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if found := re.search(rb"Range: bytes=(\d+)-", request):
            self.ranges.append(int(found[1]))
        answer, asking = await asyncio.open_connection(self._target.hostname, self._target.port)
        asking.write(request)
        writer.write(await answer.readuntil(b"\r\n\r\n"))
        left = self._cuts.pop(0) if self._cuts else 1 << 60
        while left and (piece := await answer.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            writer.write(piece)
            await writer.drain()
        asking.close()
        writer.close()


@asynccontextmanager
async def cutting_proxy(target: str, *cuts: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target, list(cuts))
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
