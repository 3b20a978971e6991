"""The append-only file of a redis-server: repaired after a crash of the machine, and waited for while it is loaded.

A script whose writes were cut in half by a machine's crash is undone, and stays undone over later restarts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from penstock.transfer_queue import QueueError, RedisServer
from penstock.transfer_queue.redis import Connection, find_redis_server
from penstock.transfer_queue.redis.server_config import newest_append_only_file, repair_append_only_file

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
    with pytest.raises(QueueError, match="damaged and cannot be repaired"):
        repair_append_only_file(find_redis_server().path, tmp_path)


def test_a_file_that_cannot_be_read_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the keeper needs it, which tries again after a `QueueError` and knows no other."""
    monkeypatch.setattr("penstock.transfer_queue.redis.server_config.REPAIR_TIMEOUT_S", 0.1)
    monkeypatch.setattr("penstock.transfer_queue.redis.server_config.REPAIR_SLOWEST_BYTES_PER_S", 4)
    hangs = tmp_path / "redis-check-aof"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o700)
    (tmp_path / "appendonly.aof").write_bytes(b"*1\r\n")
    with pytest.raises(QueueError, match=r"appendonly\.aof: redis-check-aof did not read its 0 MB within 1 s"):
        repair_append_only_file(str(hangs), tmp_path)


def test_without_a_file_there_is_nothing_to_repair(tmp_path: Path) -> None:
    repair_append_only_file("/bin/false", tmp_path)


async def ask(server: RedisServer, question: Callable[[aioredis.Redis], Awaitable[object]]) -> object:
    client = aioredis.Redis.from_url(server.url, password=PASSWORD, protocol=2)
    try:
        return await question(client)
    finally:
        await client.aclose()


class SlowLoading(RedisServer):
    """Redis sleeps before each command of its file, and answers others after every 1024 of them."""

    def _write_config(self) -> None:
        super()._write_config()
        with (self.directory / "redis.conf").open("a", encoding="utf-8") as file:
            file.write("\nkey-load-delay 200\n")


async def write_file(folder: Path, keys: int) -> int:
    """Returns the port of the server that wrote it."""
    async with RedisServer(folder, PASSWORD) as server:
        client = aioredis.Redis.from_url(server.url, password=PASSWORD)
        pipeline = client.pipeline(transaction=False)
        for number in range(keys):
            pipeline.set(f"k{number}", "x")
        await pipeline.execute()
        await client.aclose()
        return server.port


async def test_a_start_waits_while_the_file_is_loaded(tmp_path: Path) -> None:
    """Loading takes more than twice the deadline, and makes progress all the time."""
    await write_file(tmp_path, 40_000)
    started = time.monotonic()
    async with SlowLoading(tmp_path, PASSWORD, start_timeout_s=4.0) as server:
        assert time.monotonic() - started > 4.0
        client = aioredis.Redis.from_url(server.url, password=PASSWORD)
        assert await client.dbsize() == 40_000
        await client.aclose()


async def test_a_call_waits_while_redis_loads(tmp_path: Path) -> None:
    """Redis came back in mid-run, and reads its file for many times the deadline of a call."""
    port = await write_file(tmp_path, 20_000)
    async with asyncio.timeout(60):
        slow = SlowLoading(tmp_path, PASSWORD, port=port)
        starting = asyncio.create_task(slow.start())
        try:
            client = aioredis.Redis.from_url(slow.url, password=PASSWORD)
            while not await is_loading(client):
                await asyncio.sleep(0.01)
            await client.aclose()
            connection = await Connection.connect(slow.url, deadline_s=2.0, loading_timeout_s=30, password=PASSWORD)
            assert await connection.command("DBSIZE") == 20_000
            await connection.close()
            await starting
        finally:
            starting.cancel()
            await slow.stop()


async def is_loading(client: aioredis.Redis) -> bool:
    try:
        return bool((await client.info("persistence"))["loading"])
    except RedisError:
        return False
