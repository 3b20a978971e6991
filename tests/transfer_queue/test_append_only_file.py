"""A script whose writes were cut in half by a machine's crash is undone, and stays undone over later restarts."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio as aioredis

from penstock.transfer_queue import QueueError, RedisServer
from penstock.transfer_queue.redis import find_redis_server, mend_append_only_file, newest_append_only_file

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"
TWO_WRITES = "redis.call('SET', KEYS[1], 'half') redis.call('SET', KEYS[2], 'done') return 1"


@pytest.mark.parametrize("lost_bytes", [1, 20, 70])
async def test_half_a_script_stays_undone(tmp_path: Path, lost_bytes: int) -> None:
    async with RedisServer(tmp_path, PASSWORD, appendfsync="always") as server:
        await ask(server, lambda client: client.set("before", "kept"))
        await ask(server, lambda client: client.eval(TWO_WRITES, 2, "torn-1", "torn-2"))
        await server.kill()
        file = newest_append_only_file(tmp_path)
        os.truncate(file, file.stat().st_size - lost_bytes)
        for name in ("whole-0", "whole-1", "whole-2"):
            await server.restart()
            await ask(server, lambda client, name=name: client.eval(TWO_WRITES, 2, name, name))
            await server.kill()
        await server.restart()
        kept = await ask(server, lambda client: client.keys("*"))
    assert sorted(kept) == [b"before", b"whole-0", b"whole-1", b"whole-2"]


async def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server:
        await ask(server, lambda client: client.set("one", "1"))
    base = next(tmp_path.glob("appendonlydir/*.base.*"))
    base.write_bytes(b"nothing that Redis wrote")
    with pytest.raises(QueueError, match="damaged and cannot be mended"):
        mend_append_only_file(find_redis_server().path, tmp_path)


def test_without_a_file_there_is_nothing_to_mend(tmp_path: Path) -> None:
    mend_append_only_file("/bin/false", tmp_path)


async def ask(server: RedisServer, question: Callable[[aioredis.Redis], Awaitable[object]]) -> object:
    client = aioredis.Redis.from_url(server.url, password=PASSWORD, protocol=2)
    try:
        return await question(client)
    finally:
        await client.aclose()
