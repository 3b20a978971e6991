"""A machine that dies under Redis: its file is repaired and loaded, and a lost second gives nothing twice."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from queue_samples import at, tasks, trajectory, turn
from redis.exceptions import RedisError
from redis_parts import PASSWORD, ask

from penstock.transfer_queue import (
    Announcement,
    Batch,
    LeaseLost,
    Limits,
    QueueError,
    RedisServer,
    RedisTransferQueue,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis import Connection, find_redis_server
from penstock.transfer_queue.redis.server_config import newest_append_only_file, repair_append_only_file

pytestmark = pytest.mark.redis
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


class SlowLoading(RedisServer):
    """Redis sleeps before each command of its file, and answers others after every 1024 of them."""

    def _write_config(self) -> None:
        super()._write_config()
        with (self.directory / "redis.conf").open("a", encoding="utf-8") as file:
            file.write("\nkey-load-delay 200\n")


async def write_file(folder: Path, keys: int) -> int:
    """Returns the port of the server that wrote it, a command for each key."""

    async def fill(client: aioredis.Redis) -> None:
        pipeline = client.pipeline(transaction=False)
        for number in range(keys):
            pipeline.set(f"k{number}", "x")
        await pipeline.execute()

    async with RedisServer(folder, PASSWORD) as server:
        await ask(server, fill)
        return server.port


async def test_a_start_waits_while_the_file_is_loaded(tmp_path: Path) -> None:
    """Loading takes longer than the deadline, and makes progress every fifth of a second."""
    await write_file(tmp_path, 100_000)
    started = time.monotonic()
    async with SlowLoading(tmp_path, PASSWORD, start_timeout_s=15.0) as server:
        assert time.monotonic() - started > 15.0
        assert await ask(server, lambda client: client.dbsize()) == 100_000


async def test_a_call_waits_while_redis_loads(tmp_path: Path) -> None:
    """Redis came back in mid-run, and reads its file for longer than the deadline of a call."""
    port = await write_file(tmp_path, 100_000)
    async with asyncio.timeout(300):
        slow = SlowLoading(tmp_path, PASSWORD, port=port)
        starting = asyncio.create_task(slow.start())
        try:
            while not await is_loading(slow):
                await asyncio.sleep(0.01)
            connection = await Connection.connect(slow.url, deadline_s=15.0, loading_timeout_s=60, password=PASSWORD)
            assert await connection.command("DBSIZE") == 100_000
            await connection.close()
            await starting
        finally:
            starting.cancel()
            await slow.stop()


async def is_loading(server: RedisServer) -> bool:
    try:
        return bool((await ask(server, lambda client: client.info("persistence")))["loading"])
    except RedisError:
        return False


# the lost second ----------------------------------------------------------------------------------------------------
LOSS_LIMITS = Limits(group_size=2, groups_per_step=1, max_staleness=1)


class LosingServer(RedisServer):
    """Can be taken back to where it was."""

    def mark(self) -> int:
        return newest_append_only_file(self.directory).stat().st_size

    async def lose_since(self, mark: int) -> None:
        await self.kill()
        os.truncate(newest_append_only_file(self.directory), mark)
        await self.restart()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LosingServer]:
    async with LosingServer(tmp_path, PASSWORD, appendfsync="always") as started:
        yield started


@pytest.fixture
async def losing(server: LosingServer) -> AsyncIterator[RedisTransferQueue]:
    config = TransferQueueConfig(deadline_s=120.0)
    made = await RedisTransferQueue.connect(server.url, f"loss-{secrets.token_hex(4)}", config, PASSWORD)
    await made.create_run(LOSS_LIMITS, "x")
    yield made
    await made.close()


async def test_an_owner_from_the_lost_second_is_refused(server: LosingServer, losing: RedisTransferQueue) -> None:
    await losing.submit(tasks(1), cursor=at(1))
    mark = server.mark()
    lost = await losing.lease_episodes("old", 2, 0)
    await server.lose_since(mark)
    new = await losing.lease_episodes("new", 2, 0)
    assert [lease.episode_id for lease in new] == [lease.episode_id for lease in lost]
    for old, owner in zip(lost, new, strict=True):
        with pytest.raises(LeaseLost):
            await losing.journal(old, turn(1), 0)
        await losing.complete(owner, trajectory(owner))
        with pytest.raises(LeaseLost):
            await losing.complete(old, trajectory(old, reward=0.0))
    assert [one.reward for one in await losing.read([lease.episode_id for lease in new])] == [1.0, 1.0]


async def test_fences_stay_new_when_even_the_first_loss_is_lost(
    server: LosingServer, losing: RedisTransferQueue
) -> None:
    """Back to the same moment again and again: a start does not know that there were others. It does know the first."""
    await losing.submit(tasks(1), cursor=at(1))
    await server.restart()
    (first, _) = await losing.lease_episodes("first", 2, 0)
    await losing.release(first)
    mark, fences = server.mark(), [first.fence]
    for worker in ("a", "b", "c"):
        fences += [lease.fence for lease in await losing.lease_episodes(worker, 1, 0)]
        await server.lose_since(mark)
    assert len(set(fences)) == 4
    assert fences == sorted(fences)
    assert [fence / 10_000 for fence in fences] == pytest.approx([time.time()] * 4, abs=600), "ten a millisecond"


async def test_a_sweep_under_way_frees_nothing_that_is_needed_again(
    server: LosingServer, losing: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has read what is garbage, Redis forgets that it is, the client continues."""
    await losing.submit(tasks(1), cursor=at(1))
    for lease in await losing.lease_episodes("worker", 2, 0):
        await losing.complete(lease, trajectory(lease))
    assert isinstance(await losing.lease_batch(0), Batch)
    await losing.publish_version(Announcement(1, {}))
    mark, command = server.mark(), losing._connection.command

    async def lose_after_reading(*args: object) -> object:
        answer = await command(*args)
        if args[0] == "SRANDMEMBER" and answer:
            await server.lose_since(mark)
        return answer

    monkeypatch.setattr(losing._connection, "command", lose_after_reading)
    await losing.commit(1)
    status = await losing.status()
    assert (status.version, status.committed_step) == (1, 0)
    assert len(await losing.read([f"{tasks(1)[0].task_id}#{member}" for member in range(2)])) == 2
