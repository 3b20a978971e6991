"""A redis-server that roles on other machines use, and that is the last to go.

    start ─► keep alive ─► told to stop ─► `linger_while` is gone, or `linger_s` over ─► stop

A scheduler that stops a job tells all of its processes at once, redis-server too: the trainer's last checkpoint and
commit, and the head's summary, come after that and still need the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from penstock.deploy.own_redis import keep_alive
from penstock.transfer_queue import RedisServer

LOOK_S = 0.2

logger = logging.getLogger("penstock.run")


async def serve(server: RedisServer, linger_while: Path | None, linger_s: float) -> None:
    """Until cancelled, and then while the file is there: the head takes its ``connect.env`` away when it is done.

    Raises `QueueError` where redis-server does not come up, or not again.
    """
    await server.start()
    logger.info("queue at %s:%d and loopback", server.host, server.port)
    keeper = asyncio.create_task(keep_alive(server), name="redis keeper")
    try:
        await asyncio.shield(keeper)
    except asyncio.CancelledError:
        if linger_while is not None:
            await _until_gone(linger_while, linger_s)
        raise
    finally:
        keeper.cancel()
        await asyncio.wait([keeper])
        await server.stop()


async def _until_gone(path: Path, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            # A shared disk tells nobody of its changes.
            while await asyncio.to_thread(path.exists):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
