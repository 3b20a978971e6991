"""The redis-server of a run whose recipe names none: started with the run, kept alive, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator

from penstock.deploy.config import RunConfig
from penstock.deploy.link import Link
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import RedisServer
from penstock.transfer_queue.redis import ROLES, USERS_VERSION, find_redis_server, role_users

logger = logging.getLogger("penstock.run")


@contextlib.asynccontextmanager
async def own_redis(config: RunConfig, run: RunDir, token: str) -> AsyncIterator[Link]:
    """A redis-server that lives as long as the run, with a user for each role; started again when it dies."""
    password = secrets.token_urlsafe(32)
    roles = await _role_passwords()
    users = role_users(config.name, roles)
    server = RedisServer(run.redis, password, appendfsync=config.transfer_queue.appendfsync, users=users)
    await server.start()
    keeper = asyncio.create_task(keep_alive(server), name="redis keeper")
    try:
        yield Link(server.url, config.name, password, token, role_passwords=roles)
    finally:
        keeper.cancel()
        await asyncio.wait([keeper])
        await server.stop()


async def _role_passwords() -> dict[str, str]:
    """Role → password, made for this run; none where redis-server is too old for rights to read only."""
    binary = await asyncio.to_thread(find_redis_server)
    if binary.version < USERS_VERSION:
        logger.warning("%s is older than 7.0: all roles share the queue's one password", binary.path)
        return {}
    return {role: secrets.token_urlsafe(32) for role in ROLES}


async def keep_alive(server: RedisServer) -> None:
    """Redis killed from outside comes back with its append-only file; clients retry meanwhile. Raises `QueueError`."""
    while True:
        await asyncio.sleep(0.2)
        if server.alive:
            continue
        logger.warning("redis-server ended unexpectedly; starting it again from its append-only file")
        await server.restart()
