"""A redis-server that roles on other machines use, and that is the last to go.

    start ─► keep alive ─► told to stop ─► clients gone, or `linger_s` over ─► stop

A scheduler that stops a job tells all of its processes at once, redis-server too: the trainer's last checkpoint and
commit come after that and still need the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from penstock.deploy.own_redis import keep_alive
from penstock.transfer_queue.redis_server import RedisServer

LOOK_S = 0.2
ANSWER_S = 2.0
QUIET_LOOKS = 5
"""In a row without a client before it counts as left alone: one that lost its connection comes back within these."""

logger = logging.getLogger("penstock.run")


async def serve(server: RedisServer, linger_s: float) -> None:
    """Until cancelled. Raises `LedgerError` where it does not come up, or not again."""
    await server.start()
    logger.info("ledger at %s:%d and loopback", server.host, server.port)
    keeper = asyncio.create_task(keep_alive(server), name="redis keeper")
    try:
        await asyncio.shield(keeper)
    except asyncio.CancelledError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await _left_alone(server)
        raise
    finally:
        keeper.cancel()
        await asyncio.wait([keeper])
        await server.stop()


async def _left_alone(server: RedisServer) -> None:
    quiet = 0
    while quiet < QUIET_LOOKS:
        quiet = quiet + 1 if await _clients(server) == 0 else 0
        await asyncio.sleep(LOOK_S)


async def _clients(server: RedisServer) -> int | None:
    """Connections besides the one that asks; None where it does not answer, as while it starts again."""
    client = aioredis.Redis.from_url(server.url, password=server.password, protocol=2, socket_timeout=ANSWER_S)
    try:
        return int((await client.info("clients"))["connected_clients"]) - 1
    except (RedisError, OSError):
        return None
    finally:
        await client.aclose()
