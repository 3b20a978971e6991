"""Payloads: read by field, spilled to files, and lost behind a fixed step's back. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from queue_samples import LIMITS, at, finish_all, images_of, same, spill, tasks, train, trajectory

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    Batch,
    Lease,
    Limits,
    QueueError,
    RedisTransferQueue,
    StepError,
    Trajectory,
    TransferQueue,
)

BIG = 130_000


async def complete_one(queue, tokens: int):
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    sent = trajectory(lease, tokens=tokens)
    rng = np.random.default_rng(tokens)
    noisy = replace(sent.segments[0], response_logprobs=-rng.random(tokens + 1, dtype=np.float32))
    sent = replace(sent, segments=[noisy])
    await queue.complete(lease, sent)
    return sent


@pytest.mark.parametrize("tokens", [3, 3000, BIG])
async def test_fields_are_those_of_the_whole(make_queue, tokens: int) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, tokens)
    (values,) = await queue.get([sent.episode_id], ["response_mask", "response_logprobs", "reward"])
    assert (values.episode_id, dict(values.plain)) == (sent.episode_id, {"reward": 1.0})
    (segment,), (whole,) = values.segments, sent.segments
    assert sorted(segment) == ["response_logprobs", "response_mask"]
    np.testing.assert_array_equal(segment["response_mask"], whole.response_mask)
    np.testing.assert_array_equal(segment["response_logprobs"], whole.response_logprobs)


async def test_fields_come_from_behind_a_long_head(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    sent = replace(trajectory(lease, tokens=9), extra={"said": "x" * 9_000})
    await queue.complete(lease, sent)
    (values,) = await queue.get([lease.episode_id], ["response_ids", "extra"])
    assert (values.segments[0]["response_ids"].tolist(), values.plain) == (list(range(10)), {"extra": sent.extra})


async def test_images_are_counted_and_deleted_with_their_trajectory(make_queue) -> None:
    """Each once, however often it stands in the episode; a spilled step keeps them, a committed one has none left."""
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 4, 0)
    shown = images_of([b"a" * 50_000, b"b" * 50_000, b"a" * 50_000])
    for lease in leases:
        await queue.complete(lease, replace(trajectory(lease), images=shown))
    held = (await queue.status()).bytes
    assert 4 * 100_000 < held < 4 * 120_000, "with what a store needs beside them"
    await train(queue, 0)
    episodes = [lease.episode_id for lease in leases]
    assert [one.images for one in await queue.read(episodes)] == [shown] * 4
    await spill(queue, 0, episodes)
    assert [one.images for one in await queue.read(episodes)] == [shown] * 4
    await queue.commit(1)
    assert (await queue.status()).bytes == 0
    with pytest.raises(BadPayload):
        await queue.read(episodes[:1])


async def test_unknown_fields_are_named(make_queue) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, 3)
    with pytest.raises(QueueError, match=r"response_maks.*response_mask"):
        await queue.get([sent.episode_id], ["response_maks"])
    for name in ("train/0000#1", "train/0000#2", "train/9999#0", "nonsense"):
        for call in (queue.get([name], ["response_mask"]), queue.read([name])):
            with pytest.raises(BadPayload, match=f"{name}: no payload"):
                await call
    assert await queue.get([], ["response_mask"]) == []


async def test_spilled_payloads_leave_the_store_and_are_still_read(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    for lease in await queue.lease_episodes("worker", 4, 0):
        await queue.complete(lease, trajectory(lease, tokens=5000))
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    episodes = [name for group in batch.groups for name in group]
    with pytest.raises(StepError, match="version 1 is not published"):
        await spill(queue, 0, episodes)
    await queue.publish_version(Announcement(1, {}))
    before = await queue.read(episodes)
    held = (await queue.status()).bytes
    assert await spill(queue, 0, episodes[:1]) == 1  # each rank spills its share
    assert await spill(queue, 0, episodes) == 3
    assert await spill(queue, 0, episodes) == 0
    status = await queue.status()
    assert (status.episodes["spilled"], status.groups["trained"]) == (4, 2)
    assert held - status.bytes > 4 * 5000 * 9
    assert await queue.held() == set(episodes)
    after = await queue.read([episodes[2], episodes[0]])
    assert same(after, [before[2], before[0]])
    (values,) = await queue.get([episodes[1]], ["response_ids"])
    assert values.segments[0]["response_ids"].tolist() == list(range(5001))
    assert await queue.rewind(0) == 1
    assert await queue.lease_batch(0) == batch
    await queue.commit(1)
    with pytest.raises(BadPayload, match="committed"):
        await queue.read(episodes)


async def test_a_queue_without_the_archive_says_so() -> None:
    queue = MemoryTransferQueue()
    await queue.create_run(LIMITS, "config: 1")
    await queue.submit(tasks(8), cursor=at(8))
    finished = await finish_all(queue)
    await train(queue, 0)
    assert await queue.spill(0, finished[:1]) == 1
    with pytest.raises(QueueError, match=f"{finished[0]} was spilled to the run's archive"):
        await queue.read(finished[:1])


async def test_only_the_step_s_own_episodes_are_spilled(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    finished = await finish_all(queue)
    await train(queue, 0)
    assert await queue.spill(0, [finished[-1], "train/9999#0"]) == 0
    assert len(await queue.read([finished[-1]])) == 1


# several completions under one fence ------------------------------------------------------------------------------
async def store_alone(queue: TransferQueue, lease: Lease, sent: Trajectory) -> None:
    """What is left of a completion whose process was killed before the script that acknowledges it."""
    if isinstance(queue, RedisTransferQueue):
        await queue._connection.many(queue._completions.pack(lease, sent).writes)


@pytest.mark.parametrize(("first", "second"), [(4, 4), (4, 5), (130_000, 4), (4, 130_000), (130_000, 120_000)])
async def test_what_is_read_is_what_was_acknowledged_whatever_was_stored_before(make_queue, first, second) -> None:
    """Reward, tokens and size of two completions under one fence differ, as of one that a restarted gateway repeats."""
    queue: TransferQueue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    for lease in await queue.lease_episodes("worker", 2, 0):
        await store_alone(queue, lease, trajectory(lease, reward=0.25, tokens=first))
        sent = trajectory(lease, reward=0.75, tokens=second)
        await queue.complete(lease, sent)
        await queue.complete(lease, trajectory(lease, reward=0.5, tokens=first))  # too late: it changes nothing
        await store_alone(queue, lease, trajectory(lease, reward=0.25, tokens=first))
        (found,) = await queue.read([lease.episode_id])
        assert found.reward == sent.reward
        assert same(list(found.segments), list(sent.segments))


# lost payloads ------------------------------------------------------------------------------------------------------
FOUR = replace(LIMITS, group_size=4)


async def lose(queue: TransferQueue, lease: Lease) -> None:
    """As a node of a cluster that came back empty loses it."""
    if isinstance(queue, MemoryTransferQueue):
        member = queue._member(lease.episode_id)
        assert member is not None
        member.payload = None
        return
    assert isinstance(queue, RedisTransferQueue)
    (stored,) = await queue._locate([lease.episode_id])
    assert await queue._connection.command("UNLINK", queue._keys.payload(stored.name)) == 1


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


@pytest.mark.parametrize("published", [False, True])
async def test_a_step_of_nothing_is_passed_and_counted(make_queue, published: bool) -> None:
    queue, batch, _ = await shipped(make_queue)
    if published:
        await queue.publish_version(Announcement(1, {}))
    assert await queue.drop_lost(0, [one for group in batch.groups for one in group]) == 8
    assert await queue.lease_batch(0) == Batch(0, [])
    await assert_balance(queue, lost=8, lost_groups=2)
    assert await queue.publish_version(Announcement(1, {})) is not published
    await queue.commit(1, {0: []})
    await assert_balance(queue, lost=8, lost_groups=2)
    status = await queue.status()
    assert (status.unconsumed_bytes, status.committed_step, status.episodes["trained"]) == (0, 1, 0)


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
    await spill(queue, 0, batch.groups[0])
    assert await queue.drop_lost(0, batch.groups[0][:1]) == 1
    with pytest.raises(BadPayload, match=f"{batch.groups[0][0]}: no payload"):
        await queue.read(batch.groups[0][:1])
    assert len(await queue.read(batch.groups[0][1:])) == 3
    await assert_balance(queue, lost=1)
    await queue.commit(1)
    await assert_balance(queue, lost=1)
