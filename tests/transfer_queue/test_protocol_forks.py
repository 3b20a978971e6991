"""Branches share a journal, and each is counted once. The same suite runs on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import INFRA, at, expire_leases, finish_all, same, task, tasks, train, trajectory, turn

from penstock.transfer_queue import (
    Announcement,
    Batch,
    Fate,
    JournalMismatch,
    Lease,
    LeaseLost,
    Limits,
    Origin,
    QueueError,
    TransferQueue,
)

FORKED = Limits(group_size=4, groups_per_step=1, max_staleness=1, branches=3, max_attempts=1)
TURNS = [turn(number) for number in range(3)]


async def root_of(queue: TransferQueue, journal: int = 3) -> Lease:
    """The only root of the first group, with a journal of that many turns."""
    await queue.submit(tasks(1), cursor=at(1))
    (root,) = await queue.lease_episodes("worker", 9, 0)
    for position in range(journal):
        await queue.journal(root, TURNS[position], position)
    return root


async def test_a_group_begins_with_its_roots(make_queue) -> None:
    """One root for three branches, rounded up, whatever the size of the group."""
    queue = await make_queue(FORKED)
    await queue.submit([task(0), task(1, group_size=1), task(2, group_size=5), task(3, group_size=8)], cursor=at(4))
    leases = [one for _ in range(2) for one in await queue.lease_episodes("worker", 9, 0)]
    assert [one.episode_id for one in leases[:2]] == ["train/0000#0", "train/0001#0"]
    assert all(one.origin is None for one in leases)


async def test_branches_share_the_beginning_of_the_journal(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    assert await queue.fork(root, 2, TURNS[:2], 2) == ["train/0000#1", "train/0000#2"]
    branches = await queue.lease_episodes("worker", 9, 0)
    assert [one.origin for one in branches] == [Origin(root.episode_id, 2, entries=2, sampled=4)] * 2
    assert all(same(list(one.journal), TURNS[:2]) for one in branches)
    assert {one.fence for one in branches}.isdisjoint({root.fence})
    await queue.journal(branches[0], turn(7), 2)
    adopted = [(await queue.adopt(one.episode_id, one.fence)).journal for one in (*branches, root)]
    assert [len(journal) for journal in adopted] == [3, 2, 3], "the journals continue independently"


async def test_branch_of_the_task_itself_shares_nothing(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    assert await queue.fork(root, 0, [], 1) == ["train/0000#1"]
    (branch,) = await queue.lease_episodes("worker", 9, 0)
    assert (branch.origin, list(branch.journal)) == (Origin(root.episode_id, 0, 0, 0), [])
    await queue.journal(branch, TURNS[0], 0)


async def test_a_repeat_finds_the_same_branches(make_queue) -> None:
    """Also that of the next owner of the parent, whose worker was killed."""
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    first = await queue.fork(root, 1, TURNS[:1], 1)
    await expire_leases(queue)
    again, branch = await queue.lease_episodes("next", 9, 0)
    with pytest.raises(LeaseLost):
        await queue.fork(root, 1, TURNS[:1], 1)
    assert (again.episode_id, branch.episode_id) == (root.episode_id, *first)
    assert await queue.fork(again, 1, TURNS[:1], 3) == first
    assert await queue.fork(again, 2, TURNS[:2], 9) == ["train/0000#2", "train/0000#3"], "no more members wait"
    assert await queue.fork(branch, 3, TURNS[:1], 1) == []


async def test_a_branch_may_be_forked(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    await queue.fork(root, 1, TURNS[:1], 1)
    (branch,) = await queue.lease_episodes("worker", 9, 0)
    await queue.journal(branch, turn(8), 1)
    assert await queue.fork(branch, 2, [TURNS[0], turn(8)], 1) == ["train/0000#2"]
    (leaf,) = await queue.lease_episodes("worker", 9, 0)
    assert same(list(leaf.journal), [TURNS[0], turn(8)])
    assert leaf.origin == Origin(branch.episode_id, 2, 2, 4)


async def test_fork_behind_the_journal_is_refused(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue, journal=1)
    with pytest.raises(JournalMismatch) as refused:
        await queue.fork(root, 2, TURNS[:2], 1)
    assert refused.value.entries == 1
    assert await queue.lease_episodes("worker", 9, 0) == []


async def test_members_without_a_fork_start_as_roots(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    await queue.fork(root, 1, TURNS[:1], 1)
    (branch,) = await queue.lease_episodes("worker", 9, 0)
    await queue.complete(root, trajectory(root))
    assert await queue.lease_episodes("worker", 9, 0) == [], "the branch may still be forked"
    await queue.fail(branch, INFRA)
    roots = await queue.lease_episodes("worker", 9, 0)
    assert [(one.episode_id, one.origin) for one in roots] == [("train/0000#2", None), ("train/0000#3", None)]
    for one in roots:
        await queue.complete(one, trajectory(one))
    assert await queue.lease_batch(0) == Batch(0, [["train/0000#0", "train/0000#2", "train/0000#3"]])


async def test_each_branch_is_trained_once_and_leaves_nothing(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    branches = await queue.fork(root, 2, TURNS[:2], 3)
    await queue.complete(root, trajectory(root, tokens=6))
    for one in await queue.lease_episodes("worker", 9, 0):
        await queue.complete(one, trajectory(one, tokens=5))
    batch = await train(queue, 0)
    assert batch.groups == [[root.episode_id, *branches]]
    await queue.commit(1)
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["committed"], status.bytes) == (4, 4, 0)
    fates = [(name, entry.fate, n) for entry in await queue.ledger(0) for name, n in entry.episodes]
    assert fates == [(root.episode_id, Fate.TRAINED, 6), *((name, Fate.TRAINED, 1) for name in branches)]


async def test_copied_journals_count_for_back_pressure(make_queue) -> None:
    queue = await make_queue(FORKED)
    root = await root_of(queue)
    before = (await queue.status()).unconsumed_bytes
    await queue.fork(root, 3, TURNS, 3)
    assert (await queue.status()).unconsumed_bytes == 4 * before
    for one in [root, *await queue.lease_episodes("worker", 9, 0)]:
        await queue.fail(one, INFRA)
    status = await queue.status()
    assert (status.groups["dead"], status.unconsumed_bytes) == (1, 0)
    await queue.requeue(root.episode_id)
    (again,) = await queue.lease_episodes("worker", 9, 0)
    assert (again.episode_id, list(again.journal)) == (root.episode_id, []), "queued again as it was submitted"


async def test_group_over_age_takes_waiting_members_along(make_queue) -> None:
    queue = await make_queue(replace(FORKED, overage="drop", max_staleness=0))
    await queue.submit(tasks(2), cursor=at(2))
    (slow,) = await queue.lease_episodes("slow", 9, 0)
    await queue.journal(slow, TURNS[0], 0)
    await queue.fork(slow, 1, TURNS[:1], 1)
    assert await queue.pass_step(0)
    assert await queue.publish_version(Announcement(1, {}))
    await queue.lease_batch(1)
    status = await queue.status()
    assert (status.groups["dropped_over_age"], status.unconsumed_bytes) == (1, 0)
    with pytest.raises(LeaseLost):
        await queue.fork(slow, 2, TURNS[:2], 1)
    assert len(await finish_all(queue, version=1)) == 1


async def test_limits_refuse_more_branches_than_members(make_queue) -> None:
    with pytest.raises(QueueError, match=r"branches = 4 with group_size = 4: .* give at most 3"):
        await make_queue(replace(FORKED, branches=4))
