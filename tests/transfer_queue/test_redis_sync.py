"""What Redis acknowledged is in its file when it is killed, also while the disk is busy; and is synced every second.

With Redis's own ``everysec`` it answers and holds the write back for up to 2 s while a sync is under way.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis.asyncio as aioredis

from penstock.transfer_queue import RedisServer
from penstock.transfer_queue.redis.server_config import newest_append_only_file

pytestmark = [pytest.mark.redis, pytest.mark.crash]
PASSWORD = "a-test-password"
SEIZE, INTERRUPT = 0x4206, 0x4207
"""Requests of ptrace."""
SYNC_THREAD = "redis sync"
ANY_CHILD = 0x40000000
"""``__WALL``: threads too."""


def ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(thread), ctypes.c_void_p(0), ctypes.c_void_p(0)):
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}: {os.strerror(ctypes.get_errno())}")


def syncing_thread(pid: int) -> int:
    """The thread of a redis-server that syncs its append-only file."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return next(int(one.name) for one in threads if (one / "comm").read_text().startswith("bio_aof"))


@contextmanager
def frozen(thread: int) -> Iterator[None]:
    """A thread of a child process that stands still until the process is killed, inside."""
    ptrace(SEIZE, thread)
    ptrace(INTERRUPT, thread)
    os.waitpid(thread, ANY_CHILD)
    yield
    os.waitpid(thread, ANY_CHILD)  # a killed process ends when its traced threads are collected


async def test_a_sync_under_way_holds_no_write_back(tmp_path: Path) -> None:
    """Red with ``appendfsync everysec`` in redis.conf: the last write was acknowledged, and is gone."""
    async with RedisServer(tmp_path, PASSWORD) as server:
        assert server.pid is not None
        with frozen(syncing_thread(server.pid)):
            acknowledged = await write_until_a_sync_waits(server)
            killing = asyncio.create_task(server.kill())
            await asyncio.sleep(0)
        await killing
        await server.restart()
        client = client_of(server)
        assert await client.get("newest") == str(acknowledged).encode()
        await client.aclose()


async def test_a_disk_that_hangs_holds_no_write_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: (entered.set(), leave.wait(60)))
    async with RedisServer(tmp_path, PASSWORD) as server:
        assert await asyncio.to_thread(entered.wait, 60)
        client = client_of(server)
        await client.set("newest", "kept")
        await server.kill()
        leave.set()
        await server.restart()
        assert await client.get("newest") == b"kept"
        await client.aclose()


def sync_threads() -> set[threading.Thread]:
    """Other servers of this process have theirs."""
    return {thread for thread in threading.enumerate() if thread.name == SYNC_THREAD}


async def test_each_part_of_the_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, also the part that a rewrite begins; and not after the end."""
    synced: list[str] = []
    others = sync_threads()
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    async with RedisServer(tmp_path, PASSWORD) as server, asyncio.timeout(60):
        client = client_of(server)
        first = str(newest_append_only_file(tmp_path))
        while synced.count(first) < 2:
            await asyncio.sleep(0.05)
        await client.bgrewriteaof()
        while (second := str(newest_append_only_file(tmp_path))) == first or second not in synced:
            await asyncio.sleep(0.05)
        await client.aclose()
    assert sync_threads() <= others


async def test_a_sync_that_fails_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``always`` does: what the disk did not take may be gone, and the keeper starts it again from its file."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    async with RedisServer(tmp_path, PASSWORD) as server, asyncio.timeout(60):
        while server.alive:
            await asyncio.sleep(0.05)


async def test_under_always_redis_syncs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = sync_threads()
    async with RedisServer(tmp_path, PASSWORD, appendfsync="always") as server:
        assert sync_threads() <= others
        client = client_of(server)
        assert (await client.config_get("appendfsync")) == {"appendfsync": "always"}
        await client.aclose()


async def write_until_a_sync_waits(server: RedisServer) -> int:
    """And once more, and so for 3 s where Redis syncs nothing by itself."""
    client, number, end = client_of(server), 0, time.monotonic() + 3
    pending = 0
    while time.monotonic() < end and not pending:
        await asyncio.sleep(0.05)
        await client.set("newest", number := number + 1)
        pending = (await client.info("persistence"))["aof_pending_bio_fsync"]
    await client.set("newest", number := number + 1)
    await client.aclose()
    return number


def client_of(server: RedisServer) -> aioredis.Redis:
    return aioredis.Redis.from_url(server.url, password=PASSWORD, protocol=2)
