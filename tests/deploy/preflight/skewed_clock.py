"""A real Redis whose clock is wrong: a proxy in front of it that changes what TIME answers, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

TIME = re.compile(rb"\*2\r\n\$10\r\n(\d{10})\r\n(\$\d\r\n\d+\r\n)")
"""The reply to TIME in Redis's protocol: seconds and microseconds, both as text."""


@contextlib.asynccontextmanager
async def skewed(port: int, ahead_s: int) -> AsyncIterator[int]:
    """The port of the proxy."""

    def later(reply: bytes) -> bytes:
        return TIME.sub(lambda found: b"*2\r\n$10\r\n%d\r\n%b" % (int(found[1]) + ahead_s, found[2]), reply)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_pump(reader, up_writer, bytes), _pump(up_reader, writer, later))
        finally:
            up_writer.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: object) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(change(data))  # type: ignore[operator]
            await writer.drain()
    with contextlib.suppress(ConnectionError, OSError):
        writer.write_eof()
