"""Groups over the staleness bound: waited for, dropped or masked, and counted by length. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import LIMITS, at, finish_all, tasks, train, trajectory, turn

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import JournalEntry, JournalKind, Lease, LeaseLost, Limits, Waiting


async def _finish_around_a_slow_one(queue, count: int, steps: int) -> Lease:
    """The first episode of `count` groups, which is slow: all others finish and `steps` steps are trained."""
    await queue.submit(tasks(count), cursor=at(count))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    for step in range(steps):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    return slow


async def test_wait_holds_a_batch_for_slow_groups_that_are_due(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=1))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)  # groups 1 and 2; group 0 runs, group 3 is ready, both due at step 1
    for lease in await queue.lease_episodes("worker", 8, 1):
        await queue.complete(lease, trajectory(lease))
    assert await queue.lease_batch(1) == Waiting("slow groups are due: train/0000 by step 1")
    await queue.complete(slow, trajectory(slow))
    batch = await queue.lease_batch(1)
    assert [group[0] for group in batch.groups] == ["train/0000#0", "train/0003#0"]


async def test_wait_holds_a_batch_that_would_crowd_later_steps(make_queue) -> None:
    """Staleness 2: four slow groups are due at step 2, where only two find a place after step 1 has shipped others."""
    queue = await make_queue(replace(LIMITS, max_staleness=2))
    await queue.submit(tasks(8), cursor=at(8))
    leases = await queue.lease_episodes("worker", 12, 0)
    slow = leases[4:]
    for lease in leases[:4]:
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)
    assert len(await finish_all(queue, version=1)) == 4  # two groups, due at step 3
    names = ", ".join(f"train/{number:04d} by step 2" for number in range(2, 6))
    assert await queue.lease_batch(1) == Waiting(f"slow groups are due: {names}")
    for lease in slow[:4]:
        await queue.complete(lease, trajectory(lease))
    batch = await queue.lease_batch(1)
    assert [group[0] for group in batch.groups] == ["train/0002#0", "train/0003#0"]


async def test_wait_names_the_five_groups_that_are_due_first(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=3))
    await queue.submit(tasks(10), cursor=at(10))
    leases = await queue.lease_episodes("worker", 16, 0)
    for lease in leases[:4]:
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)
    assert len(await finish_all(queue, version=1)) == 4
    names = ", ".join(f"train/{number:04d} by step 3" for number in range(2, 7))
    assert await queue.lease_batch(1) == Waiting(f"slow groups are due: {names}")


@pytest.mark.parametrize(
    ("sampled", "dropped"),
    [([1, 1, 1], 0), ([2, 1, 2], 0), ([0, 1, 1], 1), ([1, 1, 0], 1), ([0, 1, None], 1), ([1, None, 1], 0)],
    ids=str,
)
async def test_a_group_is_due_by_its_oldest_version(make_queue, sampled: list[int | None], dropped: int) -> None:
    """Admitted at version 0 and sampled later: in time at step 2 from version 1 on, for a staleness of 1. A member
    without a reward is not trained, so its version does not count."""
    queue = await make_queue(replace(LIMITS, overage="drop", group_size=3, groups_per_step=1))
    await queue.submit(tasks(4), cursor=at(4))
    slow = await queue.lease_episodes("worker", 3, 0)
    await finish_all(queue)
    for step in range(2):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    for lease, version in zip(slow, sampled, strict=True):
        await queue.complete(lease, trajectory(lease, version or 0, reward=None if version is None else 1.0))
    batch = await train(queue, 2)
    assert (batch.groups[0][0] == "train/0000#0") == (dropped == 0)
    assert (await queue.status()).groups["dropped_over_age"] == dropped


async def test_drop_gives_up_groups_over_the_bound(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=0, overage="drop", groups_per_step=1))
    await queue.submit(tasks(3), cursor=at(3))
    slow, other = await queue.lease_episodes("worker", 5, 0)
    await queue.complete(other, trajectory(other))
    await queue.journal(slow, turn(1), 0)
    await queue.release(slow)
    (slow,) = await queue.lease_episodes("worker", 1, 0)
    assert await queue.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    assert await queue.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    await queue.complete(slow, trajectory(slow))
    await train(queue, 0)
    late, _ = await queue.lease_episodes("worker", 5, 1)
    assert await queue.lease_batch(1) == Waiting("0 of 1 groups ready; 1 in flight, 1 queued")
    assert await queue.renew([late]) == []


async def test_mask_ships_late_groups_and_counts_them_by_length(make_queue) -> None:
    """Nine tenths of the episodes are short and in time; a long one ships at step 3 with tokens of version 0."""
    queue = await make_queue(replace(LIMITS, overage="mask"))
    slow = await _finish_around_a_slow_one(queue, 20, steps=3)
    await queue.complete(slow, trajectory(slow, tokens=900))
    batch = await train(queue, 3)
    assert batch.groups[0] == ["train/0000#0", "train/0000#1"]
    status = await queue.status()
    assert status.episodes["masked"] == 2  # its short sibling waited for it
    assert sum(decile.episodes for decile in status.over_age) == status.episodes["completed"] == 22
    assert 901 <= status.over_age[-1].tokens_up_to <= 901 * 1.07
    assert sum(decile.over_age for decile in status.over_age) == 2
    assert status.over_age[-1].over_age == 1


async def test_drop_counts_what_it_drops_with_what_it_had_sampled(make_queue) -> None:
    """Staleness 1, two groups per step. The slow group 0 is due at step 1; steps 0 and 1 ship without it."""
    queue = await make_queue(replace(LIMITS, overage="drop"))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease, tokens=20))
    await queue.journal(slow, turn(1), 0)  # two tokens
    for step in range(3):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    status = await queue.status()
    assert status.groups["dropped_over_age"] == 1
    assert (status.episodes["dropped"], status.episodes["leased"]) == (1, 0)  # of its two members one had finished
    assert sum(decile.over_age for decile in status.over_age) == 2
    assert status.over_age[0].over_age >= 1
    assert status.over_age[0].tokens_up_to <= 3
    with pytest.raises(LeaseLost):
        await queue.complete(slow, trajectory(slow))


async def test_a_dropped_episode_counts_sampled_tokens_alone(make_queue) -> None:
    """Two tokens, and what its tools said; nothing else ended, so that all deciles are of its group."""
    queue = await make_queue(replace(LIMITS, overage="drop", max_staleness=0))
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 4, 0)
    for lease in leases:
        await queue.journal(lease, turn(1), 0)
        await queue.journal(lease, JournalEntry(JournalKind.TOOLS, data={"results": []}), 1)
    await queue.commit(1, {0: [["train/0008#0"], ["train/0009#0"]]})
    assert isinstance(await queue.lease_batch(1), Waiting)
    status = await queue.status()
    assert status.groups["dropped_over_age"] == 2
    assert {row.tokens_up_to for row in status.over_age} == {2}
    assert sum(row.episodes for row in status.over_age) == sum(row.over_age for row in status.over_age) == 4


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
