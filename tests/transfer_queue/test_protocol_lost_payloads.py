"""What `TransferQueue` promises where a payload of a fixed step is gone: the step goes on, and the accounts balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import LIMITS, at, tasks, trajectory

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    Batch,
    Lease,
    Limits,
    RedisTransferQueue,
    StepError,
    TransferQueue,
)

FOUR = replace(LIMITS, group_size=4)


async def lose(queue: TransferQueue, lease: Lease) -> None:
    """As a node of a cluster that came back empty loses it."""
    if isinstance(queue, MemoryTransferQueue):
        member = queue._member(lease.episode_id)
        assert member is not None
        member.payload = None
        return
    assert isinstance(queue, RedisTransferQueue)
    assert await queue._connection.command("UNLINK", queue._keys.payload(f"{lease.episode_id}@{lease.fence}")) == 1


async def shipped(make_queue, limits: Limits = FOUR) -> tuple[TransferQueue, Batch, dict[str, Lease]]:
    """Step 0 is fixed: two groups of `limits.group_size` episodes."""
    queue: TransferQueue = await make_queue(limits)
    await queue.submit(tasks(4), cursor=at(4))
    leases = await queue.lease_episodes("worker", 8, 0)
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    return queue, batch, {lease.episode_id: lease for lease in leases}


async def assert_balance(queue: TransferQueue, lost: int, lost_groups: int = 0) -> None:
    status = await queue.status()
    groups = dict(status.groups)
    assert groups.pop("submitted") == sum(groups.values())
    assert (status.episodes["payload_lost"], groups["payload_lost"]) == (lost, lost_groups)
    assert status.episodes["completed"] == status.episodes["committed"] + len(await queue.held()) + lost


async def test_a_lost_payload_leaves_its_step(make_queue) -> None:
    queue, batch, leases = await shipped(make_queue)
    gone = batch.groups[0][1]
    await lose(queue, leases[gone])
    with pytest.raises(BadPayload, match=gone):
        await queue.read([gone])
    assert await queue.drop_lost(0, [gone]) == 1
    assert await queue.drop_lost(0, [gone]) == 0  # a repeat
    left = await queue.lease_batch(0)
    assert left == Batch(0, [[one for one in batch.groups[0] if one != gone], batch.groups[1]])
    assert len(await queue.read([one for group in left.groups for one in group])) == 7
    await assert_balance(queue, lost=1)
    assert await queue.publish_version(Announcement(1, {}))
    await assert_balance(queue, lost=1)
    await queue.commit(1)
    await assert_balance(queue, lost=1)
    status = await queue.status()
    assert (status.unconsumed_bytes, status.episodes["trained"]) == (0, 7)


async def test_a_group_of_one_leaves_with_its_payload(make_queue) -> None:
    queue, batch, leases = await shipped(make_queue, replace(LIMITS, group_size=1))
    (gone,), (stays,) = batch.groups
    await lose(queue, leases[gone])
    assert await queue.drop_lost(0, [gone]) == 1
    assert await queue.lease_batch(0) == Batch(0, [[stays]])
    await assert_balance(queue, lost=1, lost_groups=1)


async def test_a_group_keeps_one_where_one_is_enough(make_queue) -> None:
    queue, batch, leases = await shipped(make_queue, replace(FOUR, min_group=1))
    for gone in batch.groups[1][:3]:
        await lose(queue, leases[gone])
    assert await queue.drop_lost(0, batch.groups[1][:3]) == 3
    assert await queue.lease_batch(0) == Batch(0, [batch.groups[0], batch.groups[1][3:]])
    await assert_balance(queue, lost=3)


@pytest.mark.parametrize("published", [False, True])
async def test_a_group_with_too_few_left_leaves_with_it(make_queue, published: bool) -> None:
    """Three of four are gone and `min_group` is two: the last one cannot be trained alone."""
    queue, batch, leases = await shipped(make_queue)
    if published:
        await queue.publish_version(Announcement(1, {}))
    for gone in batch.groups[1][:3]:
        await lose(queue, leases[gone])
    assert await queue.drop_lost(0, batch.groups[1][:3]) == 4
    assert await queue.lease_batch(0) == Batch(0, [batch.groups[0]])
    await assert_balance(queue, lost=4, lost_groups=1)
    if not published:
        await queue.publish_version(Announcement(1, {}))
    await queue.commit(1)
    await assert_balance(queue, lost=4, lost_groups=1)
    status = await queue.status()
    assert (status.unconsumed_bytes, status.groups["committed"], status.episodes["trained"]) == (0, 1, 4)


async def test_a_step_of_nothing_is_refused_and_unchanged(make_queue) -> None:
    queue, batch, _ = await shipped(make_queue)
    everything = [one for group in batch.groups for one in group]
    with pytest.raises(BadPayload, match="step 0"):
        await queue.drop_lost(0, everything)
    assert await queue.lease_batch(0) == batch
    await assert_balance(queue, lost=0)


async def test_only_fixed_steps_lose_episodes(make_queue) -> None:
    queue, batch, _ = await shipped(make_queue)
    with pytest.raises(StepError, match="step 1"):
        await queue.drop_lost(1, ["train/0002#0"])
    assert await queue.drop_lost(0, ["train/0002#0", "train/9999#0"]) == 0
    await queue.publish_version(Announcement(1, {}))
    await queue.commit(1)
    with pytest.raises(StepError, match="step 0"):
        await queue.drop_lost(0, batch.groups[0])


async def test_a_spilled_payload_may_be_lost_too(make_queue) -> None:
    queue, batch, _ = await shipped(make_queue)
    await queue.publish_version(Announcement(1, {}))
    await queue.spill(0, batch.groups[0])
    assert await queue.drop_lost(0, batch.groups[0][:1]) == 1
    with pytest.raises(BadPayload, match=f"{batch.groups[0][0]}: no payload"):
        await queue.read(batch.groups[0][:1])
    assert len(await queue.read(batch.groups[0][1:])) == 3
    await assert_balance(queue, lost=1)
    await queue.commit(1)
    await assert_balance(queue, lost=1)
