"""What `TransferQueue` promises of groups: filtering, priorities, quotas, capacity. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import INFRA, LIMITS, at, finish_all, task, tasks, train, trajectory

from penstock.transfer_queue import (
    Batch,
    Limits,
    QueueError,
    TooManyFiltered,
    Waiting,
)

FILTERED = replace(LIMITS, filter_groups="zero_variance", max_staleness=0)


WIDE_LIMITS = Limits(group_size=2, groups_per_step=2, max_staleness=2)


async def finish_group(queue, rewards: list[float | None], version: int = 0) -> list[str]:
    leases = await queue.lease_episodes("worker", len(rewards), version)
    for lease, reward in zip(leases, rewards, strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward))
    return [lease.episode_id for lease in leases]


async def test_groups_of_equal_rewards_are_filtered_and_refilled(make_queue) -> None:
    queue = await make_queue(FILTERED)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_group(queue, [1.0, 1.0])
    await finish_group(queue, [0.0, 1.0])
    assert await queue.lease_batch(0) == Waiting("1 of 2 groups ready; 0 in flight, 2 queued")
    await finish_group(queue, [0.5, 0.25])  # group 2 has the place of group 0
    assert await queue.lease_episodes("worker", 2, 0) == []
    batch = await train(queue, 0)
    assert [group[0] for group in batch.groups] == ["train/0001#0", "train/0002#0"]
    status = await queue.status()
    assert (status.groups["filtered"], status.episodes["filtered"], status.episodes["completed"]) == (1, 2, 6)
    assert await queue.held() == {name for group in batch.groups for name in group}
    await queue.commit(1)
    assert (await queue.status()).unconsumed_bytes == 0


async def test_unrewarded_members_do_not_count_for_the_variance(make_queue) -> None:
    queue = await make_queue(replace(FILTERED, group_size=3, groups_per_step=1))
    await queue.submit(tasks(2), cursor=at(2))
    await finish_group(queue, [1.0, None, 1.0])
    assert (await queue.status()).episodes["filtered"] == 3
    await finish_group(queue, [1.0, None, 0.0])
    assert await queue.lease_batch(0) == Batch(0, [["train/0001#0", "train/0001#2"]])
    assert (await queue.status()).episodes["unrewarded"] == 1


async def test_filtered_groups_are_limited_by_whole_steps(make_queue) -> None:
    """One step of two groups may be filtered, and 0 is no limit."""
    one, endless = [await make_queue(replace(FILTERED, max_filtered_steps=steps)) for steps in (1, 0)]
    for queue in (one, endless):
        await queue.submit(tasks(5), cursor=at(5))
        for _ in range(2):
            await finish_group(queue, [1.0, 1.0])
        assert isinstance(await queue.lease_batch(0), Waiting)
        await finish_group(queue, [1.0, 1.0])
    with pytest.raises(TooManyFiltered, match=r"step 0: 3 groups .* more than 1 steps of 2 \(max_filtered_steps\)"):
        await one.lease_batch(0)
    assert isinstance(await endless.lease_batch(0), Waiting)
    smallest = await make_queue(replace(FILTERED, max_filtered_steps=1, groups_per_step=1))
    await smallest.submit(tasks(2), cursor=at(2))
    for _ in range(2):
        assert isinstance(await smallest.lease_batch(0), Waiting)
        await finish_group(smallest, [1.0, 1.0])
    with pytest.raises(TooManyFiltered, match="step 0: 2 groups"):
        await smallest.lease_batch(0)


async def test_a_step_resets_the_count_of_filtered_groups(make_queue) -> None:
    queue = await make_queue(replace(FILTERED, groups_per_step=1, max_filtered_steps=1))
    await queue.submit(tasks(6), cursor=at(6))
    for step in range(2):
        await finish_group(queue, [1.0, 1.0], step)
        await finish_group(queue, [1.0, 0.0], step)
        await train(queue, step)
    assert (await queue.status()).groups["filtered"] == 2


async def test_higher_priorities_are_admitted_first(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, group_size=1, min_group=1))
    order = [task(0), task(1, priority=5), task(2, priority=-3), task(3, priority=5)]
    await queue.submit(order, cursor=at(4))
    seen = [lease.task.task_id for _ in range(4) for lease in await queue.lease_episodes("worker", 1, 0)]
    assert seen == ["train/0001", "train/0003", "train/0000", "train/0002"]


async def test_a_quota_bounds_a_source_and_lets_others_pass(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, quotas={"swe": 1}))
    await queue.submit([task(n, source="swe" if n < 3 else "sums") for n in range(6)], cursor=at(6))
    leases = await queue.lease_episodes("worker", 8, 0)
    assert [lease.task.data_source for lease in leases] == ["swe"] * 2 + ["sums"] * 6
    assert (await queue.status()).groups["queued"] == 2
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    assert await queue.lease_episodes("worker", 8, 0) == []  # ready counts against the quota too
    batch = await train(queue, 0)
    assert batch.groups[0] == ["train/0000#0", "train/0000#1"]
    (first, *_) = await queue.lease_episodes("worker", 8, 1)
    assert first.task.task_id == "train/0001"


async def test_a_dead_group_gives_its_quota_back(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, quotas={"swe": 1}, max_attempts=1))
    await queue.submit([task(n, source="swe") for n in range(2)], cursor=at(2))
    for lease in await queue.lease_episodes("worker", 8, 0):
        await queue.fail(lease, INFRA)
    assert {lease.task.task_id for lease in await queue.lease_episodes("worker", 8, 0)} == {"train/0001"}
    assert await queue.lease_episodes("worker", 8, 0) == []
    await queue.requeue("train/0000#0")
    assert (await queue.status()).groups["queued"] == 1


@pytest.mark.parametrize("filtered", [False, True])
async def test_groups_that_leave_give_their_quota_back(make_queue, filtered: bool) -> None:
    """A filtered one at its end; a dropped one when its step has gone."""
    kind = replace(LIMITS, filter_groups="zero_variance") if filtered else replace(LIMITS, overage="drop")
    queue = await make_queue(replace(kind, groups_per_step=1, max_staleness=0, quotas={"swe": 1}))
    await queue.submit([task(n, source="swe") for n in range(3)], cursor=at(3))
    first = await queue.lease_episodes("worker", 5, 0)
    assert {lease.task.task_id for lease in first} == {"train/0000"}
    if filtered:
        for lease in first:
            await queue.complete(lease, trajectory(lease))
    else:
        await queue.commit(1, {0: [["train/0009#0"]]})
        assert isinstance(await queue.lease_batch(1), Waiting)
        assert (await queue.status()).groups["dropped_over_age"] == 1
    second = await queue.lease_episodes("worker", 5, 1)
    assert {lease.task.task_id for lease in second} == {"train/0001"}


@pytest.mark.parametrize(
    ("rewards", "left"), [((0.7 + 0.2 + 0.1, 1.0), 1), ((0.999, 1.0), 0), ((1e9 + 1, 1e9), 1), ((0.999999, 1.0), 1)]
)
async def test_rewards_that_differ_by_rounding_are_equal(make_queue, rewards, left: int) -> None:
    queue = await make_queue(FILTERED)
    await queue.submit(tasks(1), cursor=at(1))
    for lease, reward in zip(await queue.lease_episodes("worker", 2, 0), rewards, strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward))
    assert (await queue.status()).groups["filtered"] == left


async def test_back_pressure_begins_above_max_bytes(make_queue) -> None:
    limits = replace(LIMITS, groups_per_step=1, max_staleness=3)
    first = await make_queue(limits)
    await first.submit(tasks(2), cursor=at(2))
    await finish_all(first, count=2)
    held = (await first.status()).unconsumed_bytes
    for room, taken in ((0, 2), (-1, 0)):
        queue = await make_queue(replace(limits, max_bytes=held + room))
        await queue.submit(tasks(2), cursor=at(2))
        await finish_all(queue, count=2)
        assert len(await queue.lease_episodes("worker", 2, 0)) == taken


async def test_max_groups_bounds_what_is_in_the_system(make_queue) -> None:
    """Of one, too."""
    one = await make_queue(replace(LIMITS, groups_per_step=1, max_staleness=2, max_groups=1))
    await one.submit(tasks(3), cursor=at(3))
    assert len(await one.lease_episodes("worker", 9, 0)) == 2
    queue = await make_queue(replace(LIMITS, max_staleness=4, max_groups=3))
    await queue.submit(tasks(8), cursor=at(8))
    assert len(await finish_all(queue)) == 6
    assert await finish_all(queue) == []
    await train(queue, 0)
    assert len(await finish_all(queue, version=1)) == 4


async def test_limits_that_no_run_can_work_with_are_refused(make_queue) -> None:
    with pytest.raises(QueueError, match=r"max_groups = 1 < groups_per_step = 2.*give at least 2"):
        await make_queue(replace(LIMITS, max_groups=1))


async def test_a_run_keeps_its_quotas(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, quotas={"b": 2, "a": 1}))
    await queue.create_run(replace(LIMITS, quotas={"a": 1, "b": 2}), "config: 1")
    with pytest.raises(QueueError, match="quotas"):
        await queue.create_run(replace(LIMITS, quotas={"a": 2, "b": 2}), "config: 1")


async def test_groups_beyond_their_quotas_room_are_parked(make_queue) -> None:
    queue = await make_queue(replace(WIDE_LIMITS, quotas={"b": 1}))
    sources = ["b", "b", "a", "b"]
    await queue.submit([replace(task(n), data_source=source) for n, source in enumerate(sources)], cursor=at(4))
    assert ((await queue.status()).parked, (await queue.status()).groups["queued"]) == (2, 4)
    leases = await queue.lease_episodes("w", 100, 0)
    assert len(leases) == 4
    assert ((await queue.status()).parked, (await queue.status()).groups["queued"]) == (2, 2)
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    assert isinstance(await queue.lease_batch(0), Batch)
    assert ((await queue.status()).parked, (await queue.status()).groups["queued"]) == (1, 2)


async def test_a_tasks_own_group_size_is_that_of_its_group(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, min_group=2))
    sized = [task(0, group_size=3), task(1), task(2, group_size=1)]
    await queue.submit(sized, cursor=at(3))
    status = await queue.status()
    assert (status.groups["queued"], status.episodes["queued"]) == (3, 3 + 2 + 1)
    leases = await queue.lease_episodes("worker", 5, 0)
    assert [lease.episode_id for lease in leases] == [*(f"train/0000#{m}" for m in range(3)), *at_members(1, 2)]
    assert (await queue.status()).episodes["queued"] == 1
    for lease, reward in zip(leases, (0.0, None, 1.0, 0.5, None), strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward))
    status = await queue.status()
    assert (status.groups["ready"], status.groups["dead"]) == (1, 1), "two of three are enough, one of two is not"
    await finish_group(queue, [1.0])
    assert await queue.lease_batch(0) == Batch(0, [["train/0000#0", "train/0000#2"], ["train/0002#0"]])
    await queue.requeue("train/0001#1")
    assert (await queue.status()).episodes["queued"] == 2
    await queue.submit([task(3, "eval/1", group_size=4)])
    assert (await queue.status()).other_splits == {"eval/1": {"queued": 1, "leased": 0, "done": 0}}


def at_members(number: int, count: int) -> list[str]:
    return [f"train/{number:04d}#{member}" for member in range(count)]


async def test_a_task_that_the_queue_cannot_keep_is_refused(make_queue) -> None:
    queue = await make_queue(LIMITS)
    with pytest.raises(QueueError, match="train/0000: group_size is"):
        await queue.submit([task(0, group_size=0)])
