"""What `TransferQueue` promises of groups: filtering, priorities, quotas, capacity. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import INFRA, LIMITS, at, finish_all, task, tasks, train, trajectory, turn

from penstock.transfer_queue import Batch, Limits, MemoryTransferQueue, QueueError, TooManyFiltered, Waiting

FILTERED = replace(LIMITS, filter_groups="zero_variance", max_staleness=0)


async def finish_group(queue, rewards: list[float | None], version: int = 0) -> list[str]:
    leases = await queue.lease_episodes("worker", len(rewards), version)
    for lease, reward in zip(leases, rewards, strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward))
    return [lease.episode_id for lease in leases]


# filtering ---------------------------------------------------------------------------------------------------------
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


async def test_a_run_that_filters_everything_stops_and_says_why(make_queue) -> None:
    queue = await make_queue(replace(FILTERED, groups_per_step=1, max_filtered_steps=2))
    await queue.submit(tasks(5), cursor=at(5))
    for _ in range(2):
        await finish_group(queue, [1.0, 1.0])
    assert isinstance(await queue.lease_batch(0), Waiting)
    await finish_group(queue, [1.0, 1.0])
    with pytest.raises(TooManyFiltered, match=r"3 groups had equal rewards.*max_filtered_steps"):
        await queue.lease_batch(0)


async def test_a_step_resets_the_count_of_filtered_groups(make_queue) -> None:
    queue = await make_queue(replace(FILTERED, groups_per_step=1, max_filtered_steps=1))
    await queue.submit(tasks(6), cursor=at(6))
    for step in range(2):
        await finish_group(queue, [1.0, 1.0], step)
        await finish_group(queue, [1.0, 0.0], step)
        await train(queue, step)
    assert (await queue.status()).groups["filtered"] == 2


# order -------------------------------------------------------------------------------------------------------------
async def test_higher_priorities_are_admitted_first(make_queue) -> None:
    queue = await make_queue(LIMITS)
    order = [task(0), task(1, priority=5), task(2, priority=-3), task(3, priority=5)]
    await queue.submit(order, cursor=at(4))
    leases = await queue.lease_episodes("worker", 8, 0)
    admitted = sorted({(lease.fence // 2, lease.task.task_id) for lease in leases})
    assert {name for _, name in admitted} == {f"train/{n:04d}" for n in range(4)}
    one_by_one = await make_queue(replace(LIMITS, group_size=1, min_group=1))
    await one_by_one.submit(order, cursor=at(4))
    seen = [lease.task.task_id for _ in range(4) for lease in await one_by_one.lease_episodes("worker", 1, 0)]
    assert seen == ["train/0001", "train/0003", "train/0000", "train/0002"]


@pytest.mark.parametrize("priority", [1001, -1001])
async def test_priorities_out_of_range_are_refused(make_queue, priority: int) -> None:
    queue = await make_queue(LIMITS)
    with pytest.raises(QueueError, match="priority"):
        await queue.submit([task(0, priority=priority)])


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


# capacity ----------------------------------------------------------------------------------------------------------
async def test_max_groups_bounds_what_is_in_the_system(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=4, max_groups=3))
    await queue.submit(tasks(8), cursor=at(8))
    assert len(await finish_all(queue)) == 6
    assert await finish_all(queue) == []
    await train(queue, 0)
    assert len(await finish_all(queue, version=1)) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_groups": 1}, r"max_groups = 1 < groups_per_step = 2.*give at least 2"),
        ({"filter_groups": "zero_variance", "group_size": 1}, "would filter every group"),
        ({"filter_groups": "some"}, "filter_groups is 'some'; one of none, zero_variance"),
        ({"overage": "keep"}, "overage is 'keep'; one of wait, mask, drop"),
        ({"quotas": {"swe": 0}}, "quota of 'swe' is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
    ],
)
async def test_limits_that_no_run_can_work_with_are_refused(make_queue, change, said: str) -> None:
    with pytest.raises(QueueError, match=said):
        await make_queue(replace(LIMITS, **change))


async def test_a_run_keeps_its_quotas(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, quotas={"b": 2, "a": 1}))
    await queue.create_run(replace(LIMITS, quotas={"a": 1, "b": 2}), "config: 2")
    with pytest.raises(QueueError, match="quotas"):
        await queue.create_run(replace(LIMITS, quotas={"a": 2, "b": 2}), "config: 2")


# over-age by length ------------------------------------------------------------------------------------------------
async def test_masked_episodes_are_counted_by_length(make_queue) -> None:
    """Nine tenths of the episodes are short and in time; a long one ships at step 3 with tokens of version 0."""
    queue = await make_queue(replace(LIMITS, overage="mask"))
    await queue.submit(tasks(20), cursor=at(20))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    for step in (0, 1, 2):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    await queue.complete(slow, trajectory(slow, tokens=900))
    batch = await train(queue, 3)
    assert batch.groups[0] == ["train/0000#0", "train/0000#1"]
    status = await queue.status()
    assert status.episodes["masked"] == 2  # its short sibling waited for it
    assert sum(decile.episodes for decile in status.over_age) == status.episodes["completed"] == 22
    assert 901 <= status.over_age[-1].tokens_up_to <= 901 * 1.07
    assert sum(decile.over_age for decile in status.over_age) == 2
    assert status.over_age[-1].over_age == 1


async def test_dropped_episodes_count_with_what_they_had_sampled(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, overage="drop"))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease, tokens=20))
    await queue.journal(slow, turn(1))  # two tokens
    for step in range(3):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    status = await queue.status()
    assert status.groups["dropped_over_age"] == 1
    assert sum(decile.over_age for decile in status.over_age) == 2
    assert status.over_age[0].over_age >= 1
    assert status.over_age[0].tokens_up_to <= 3


async def test_an_episode_is_counted_under_one_reason(make_queue) -> None:
    """A member without a reward in a group that became ready and then over-age: unrewarded, not dropped too."""
    queue = await make_queue(replace(LIMITS, overage="drop", group_size=3, groups_per_step=1, max_staleness=1))
    await queue.submit(tasks(6), cursor=at(6))
    slow = await queue.lease_episodes("worker", 3, 0)
    await finish_all(queue)
    await train(queue, 0)
    await finish_all(queue, version=1)
    for lease, reward in zip(slow, [1.0, 0.0, None], strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward))
    await queue.commit(2, {1: [["train/0002#0"]]})  # the group of version 0 was not in it, and step 2 is too late
    assert isinstance(await queue.lease_batch(2), Waiting)
    episodes = (await queue.status()).episodes
    reasons = {name: episodes[name] for name in ("dropped", "unrewarded", "committed")}
    assert episodes["completed"] == sum(reasons.values()) + len(await queue.held())
    assert (reasons["dropped"], (await queue.status()).groups["dropped_over_age"]) == (2, 1)


async def test_no_decile_before_anything_finished() -> None:
    queue = MemoryTransferQueue()
    await queue.create_run(Limits(1, 1, 0), "x")
    assert (await queue.status()).over_age == []
