"""What one second lost with Redis's machine must not do: give a fence twice, free what is needed again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from queue_samples import at, tasks, trajectory, turn

from penstock.transfer_queue import (
    Announcement,
    Batch,
    LeaseLost,
    Limits,
    RedisServer,
    RedisTransferQueue,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis.server_config import newest_append_only_file

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"
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
    config = TransferQueueConfig(deadline_s=20.0)
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
