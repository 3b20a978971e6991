"""What is done to Redis, to clocks and to connections while a stage plays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import redis.asyncio as aioredis

from penstock.transfer_queue import RedisServer
from penstock.transfer_queue.redis.server_config import newest_append_only_file


async def kill_redis(server: RedisServer, chance: random.Random) -> None:
    """SIGKILL, a short while of nothing, restart from the append-only file."""
    await server.kill()
    await asyncio.sleep(chance.choice([0.0, chance.uniform(0, 0.3)]))
    await server.restart()


async def pause_redis(server: RedisServer, seconds: float) -> None:
    """It keeps its connections and answers nothing: SIGSTOP, later SIGCONT."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def fill_redis(client: aioredis.Redis, seconds: float) -> None:
    """Full for a while: whatever needs memory is refused."""
    await client.config_set("maxmemory", 1 << 20)
    await asyncio.sleep(seconds)
    await client.config_set("maxmemory", 0)


async def lose_tail(server: RedisServer, chance: random.Random) -> int:
    """What a machine that dies does to ``everysec``: what was appended in the last second was not all on disk.

    Returns how many bytes were lost.
    """
    file = newest_append_only_file(server.directory)
    safe = file.stat().st_size
    await asyncio.sleep(chance.uniform(0.05, 1.0))
    await server.kill()
    size = file.stat().st_size
    kept = chance.randint(safe, size)
    os.truncate(file, kept)
    await server.restart()
    return size - kept


HOUR_S = 3600.0
REAL_TIME, REAL_MONOTONIC = time.time, time.monotonic


@asynccontextmanager
async def jump_now_and_then(chance: random.Random, enabled: bool) -> AsyncIterator[None]:
    """Every half second or so `time.time` jumps by an hour, either way, and `time.monotonic` ahead, which ends all
    running timeouts of the event loop."""
    if not enabled:
        yield
        return
    wall_s = monotonic_s = 0.0

    async def jump() -> None:
        nonlocal wall_s, monotonic_s
        while True:
            await asyncio.sleep(chance.uniform(0.2, 0.8))
            wall_s = chance.choice([-HOUR_S, 0.0, HOUR_S])
            monotonic_s += chance.choice([0.0, 0.0, HOUR_S])

    time.time = lambda: REAL_TIME() + wall_s
    time.monotonic = lambda: REAL_MONOTONIC() + monotonic_s
    jumping = asyncio.create_task(jump())
    try:
        yield
    finally:
        jumping.cancel()
        time.time, time.monotonic = REAL_TIME, REAL_MONOTONIC


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
