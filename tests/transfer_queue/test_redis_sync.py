"""What Redis acknowledged is in its file when it is killed, also while the disk hangs; and is synced every second."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from redis_parts import PASSWORD, ask

from penstock.transfer_queue import RedisServer
from penstock.transfer_queue.redis.server_config import newest_append_only_file

pytestmark = [pytest.mark.redis, pytest.mark.crash]
SYNC_THREAD = "redis sync"


async def test_a_disk_that_hangs_holds_no_write_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: (entered.set(), leave.wait(60)))
    async with RedisServer(tmp_path, PASSWORD) as server:
        assert await asyncio.to_thread(entered.wait, 60)
        await ask(server, lambda client: client.set("newest", "kept"))
        await server.kill()
        leave.set()
        await server.restart()
        assert await ask(server, lambda client: client.get("newest")) == b"kept"


def sync_threads() -> set[threading.Thread]:
    """Other servers of this process have theirs."""
    return {thread for thread in threading.enumerate() if thread.name == SYNC_THREAD}


async def test_each_part_of_the_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, also the part that a rewrite begins; and not after the end."""
    synced: list[str] = []
    others = sync_threads()
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    async with RedisServer(tmp_path, PASSWORD) as server, asyncio.timeout(60):
        first = str(newest_append_only_file(tmp_path))
        while synced.count(first) < 2:
            await asyncio.sleep(0.05)
        await ask(server, lambda client: client.bgrewriteaof())
        while (second := str(newest_append_only_file(tmp_path))) == first or second not in synced:
            await asyncio.sleep(0.05)
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
        assert await ask(server, lambda client: client.config_get("appendfsync")) == {"appendfsync": "always"}
