"""Payloads in Redis: whole when they are acknowledged, named when they are damaged, moved in bounded round trips."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from queue_samples import LIMITS, at, same, spill, tasks, trajectory
from redis_cluster import RedisCluster
from redis_parts import CONFIG, PASSWORD

from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    Batch,
    Lease,
    QueueError,
    QueueUnavailable,
    RedisTransferQueue,
    encode_trajectory,
)

pytestmark = pytest.mark.redis


async def completed(queue: RedisTransferQueue, episodes: int) -> list[Lease]:
    await queue.submit(tasks(3), cursor=at(3))
    leases = await queue.lease_episodes("worker", episodes, 0)
    for lease in leases:
        await queue.complete(lease, trajectory(lease, tokens=500))
    return leases


async def spilled(queue: RedisTransferQueue) -> str:
    """An episode of a step that is trained and in the batch log."""
    await queue.submit(tasks(2), cursor=at(2))
    for lease in await queue.lease_episodes("worker", 4, 0):
        await queue.complete(lease, trajectory(lease))
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    await queue.publish_version(Announcement(1, {}))
    (episode, *_), *_ = batch.groups
    assert await spill(queue, 0, [episode]) == 1
    return episode


async def test_long_payloads_are_read_by_field_and_spilled(
    queue: RedisTransferQueue, trainer: RedisTransferQueue
) -> None:
    """Long enough to be received into memory of their own, in one key and in several; what comes of it is read-only."""
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 4, 0)
    sent = [trajectory(lease, tokens=tokens) for lease, tokens in zip(leases, (2, 6_000, 40_000, 90_000), strict=True)]
    for lease, work in zip(leases, sent, strict=True):
        await queue.complete(lease, work)
    names = [lease.episode_id for lease in leases]
    assert isinstance(await trainer.lease_batch(0), Batch)
    await trainer.publish_version(Announcement(1, {}))
    for is_spilled in (False, True):
        if is_spilled:
            assert await spill(trainer, 0, names) == 4
        found = await trainer.read(names)
        assert all(same(one.segments, work.segments) for one, work in zip(found, sent, strict=True))
        assert not any(one.segments[0].response_ids.flags.writeable for one in found)
        for values, work in zip(await trainer.get(names, ["response_ids", "version_spans"]), sent, strict=True):
            assert same(values.segments[0]["response_ids"], work.segments[0].response_ids)
            assert same(values.segments[0]["version_spans"], work.segments[0].version_spans)


async def test_a_payload_whose_script_is_refused_for_another_reason_is_deleted(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    write_and_run = queue._connection.write_and_run

    async def run_and_break(*args: Any, **options: Any) -> None:
        await write_and_run(*args, **options)
        raise QueueError("not allowed")

    monkeypatch.setattr(queue._connection, "write_and_run", run_and_break)
    with pytest.raises(QueueError, match="not allowed"):
        await queue.complete(lease, trajectory(lease))
    assert not [key async for keys in queue._connection.scan(f"*{lease.episode_id}@*") for key in keys]


async def test_a_client_without_the_archive_says_so(queue: RedisTransferQueue, trainer: RedisTransferQueue) -> None:
    episode = await spilled(trainer)
    for call in (queue.read([episode]), queue.get([episode], ["reward"])):
        with pytest.raises(QueueError, match=f"{episode} was spilled to the run's archive"):
            await call
    assert [found.episode_id for found in await trainer.read([episode])] == [episode]


@pytest.mark.parametrize("damaged", [b"", b"x" * 40, None], ids=["empty", "other", "cut"])
async def test_a_damaged_payload_is_named_by_its_episode(queue: RedisTransferQueue, damaged: bytes | None) -> None:
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    await queue.complete(lease, trajectory(lease))
    (stored,) = await queue._locate([lease.episode_id])
    key = queue._keys.payload(stored.name)
    whole = await queue._connection.command("GET", key)
    await queue._connection.command("SET", key, whole[:-1] if damaged is None else damaged.ljust(len(whole), b"x"))
    for call in (queue.read([lease.episode_id]), queue.get([lease.episode_id], ["response_mask"])):
        with pytest.raises(BadPayload, match=lease.episode_id):
            await call


async def test_payloads_come_in_round_trips_of_bounded_size(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of a hundred megabytes is not one reply that Redis must build in memory."""
    leases = await completed(queue, 5)
    many, trips = queue._connection.many, []

    async def counted(commands: Sequence[Sequence[object]]) -> list[object]:
        trip: list[int] = []
        trips.append(trip)  # in the order in which they begin
        replies = await many(commands)
        trip += [len(reply) for reply in replies]
        return replies

    monkeypatch.setattr(queue._connection, "many", counted)
    names = [lease.episode_id for lease in leases]
    await queue.read(names[:1])
    ((size,),) = trips
    for limit, expected in ((2 * size + 9, [2, 2, 1]), (2 * size, [2, 2, 1]), (size - 1, [1, 1, 1, 1, 1])):
        trips.clear()
        monkeypatch.setattr("penstock.transfer_queue.redis.payloads.PIPELINE_BYTES", limit)
        assert [found.episode_id for found in await queue.read(names)] == names
        assert [len(trip) for trip in trips] == expected


async def test_a_reader_that_stops_leaves_no_round_trip_under_way(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is requested while the caller unpacks a payload; a caller that fails does not wait for it."""
    leases = await completed(queue, 5)
    (stored,) = await queue._locate([leases[0].episode_id])
    await queue._connection.command("DEL", queue._keys.payload(stored.name))
    many, begun, ended = queue._connection.many, [], []

    async def silent_after_the_first(commands: Sequence[Sequence[object]]) -> list[object]:
        begun.append(commands)
        if len(begun) == 1:
            return await many(commands)
        try:
            await asyncio.Event().wait()  # a Redis that never answers
        finally:
            ended.append(commands)
        return []

    monkeypatch.setattr(queue._connection, "many", silent_after_the_first)
    monkeypatch.setattr("penstock.transfer_queue.redis.payloads.PIPELINE_BYTES", 1)
    async with asyncio.timeout(200):
        with pytest.raises(BadPayload, match=leases[0].episode_id):
            await queue.read([lease.episode_id for lease in leases])
    assert len(begun) == 2
    assert ended == begun[1:]


async def test_a_payload_that_lacks_a_byte_is_not_acknowledged(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored under an acknowledged name is whole: else the trainer finds out, and the episode has ended."""
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    sent = trajectory(lease)
    whole = encode_trajectory(sent)
    monkeypatch.setattr("penstock.transfer_queue.redis.completions.new_nonce", lambda: "once")
    key = queue._keys.payload(f"{lease.episode_id}@{lease.fence}.once")
    await queue._connection.command("SET", key, whole[:-1])
    queue._connection._deadline_s = 0.3
    with pytest.raises(QueueUnavailable, match=f"{len(whole) - 1} of {len(whole)} payload bytes"):
        await queue.complete(lease, sent)
    queue._connection._deadline_s = CONFIG.deadline_s
    assert (await queue.status()).episodes["completed"] == 0
    await queue._connection.command("DEL", key)
    await queue.complete(lease, sent)
    assert (await queue.status()).episodes["completed"] == 1


WRITER = """
import asyncio, os, signal, sys
from queue_samples import trajectory
from redis_parts import CONFIG, PASSWORD
from penstock.transfer_queue import RedisTransferQueue
from penstock.transfer_queue.redis import Connection

async def die(self, writes, *_, **__):
    assert await self.many(writes)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    queue = await RedisTransferQueue.connect(sys.argv[1], sys.argv[2], CONFIG, PASSWORD)
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    Connection.write_and_run = die
    await queue.complete(lease, trajectory(lease, tokens=40_000))

asyncio.run(main())
"""


async def test_payloads_of_a_killed_writer_are_released_on_a_cluster(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after the payload is stored, before the index knows of it; what is acknowledged stays."""
    run = f"t-{secrets.token_hex(4)}"
    queue = await RedisTransferQueue.connect(redis_cluster.url, run, CONFIG, PASSWORD)
    await queue.create_run(LIMITS, "config: 1")
    await queue.submit(tasks(3), cursor=at(3))
    try:
        command = [sys.executable, "-c", WRITER, redis_cluster.url, run]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        writer = await asyncio.create_subprocess_exec(*command, env=environment)
        assert await writer.wait() == -signal.SIGKILL
        (lease,) = await queue.lease_episodes("other", 1, 0)
        sent = trajectory(lease)
        await queue.complete(lease, sent)
        whole = await payload_keys(queue)
        await queue.drop_split("none")
        assert await payload_keys(queue) == whole, "younger than any call that is under way"
        monkeypatch.setattr("penstock.transfer_queue.redis.queue.UNACKNOWLEDGED_S", 0)
        await queue.drop_split("none")
        assert len(whole) > len(await payload_keys(queue)) == 1
        (read,) = await queue.read([lease.episode_id])
        assert same(list(read.segments), list(sent.segments))
        assert await queue._connection.command("EXISTS", f"{queue._keys.index}reserved") == 0
    finally:
        await queue.drop_run()
        await queue.close()


async def payload_keys(queue: RedisTransferQueue) -> set[bytes]:
    return {key async for keys in queue._connection.scan(queue._keys.patterns()[1]) for key in keys}
