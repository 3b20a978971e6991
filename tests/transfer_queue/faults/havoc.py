"""What is done to Redis while a stage plays. Each kind is a coroutine function of the server and a source of chance."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import redis.asyncio as aioredis

from penstock.transfer_queue import RedisServer
from penstock.transfer_queue.redis import newest_append_only_file


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
