"""Several ended episodes in one call: each is taken or refused for itself, and a repeat of all of them is a no-op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from queue_samples import LIMITS, at, same, task, tasks, train, trajectory, turn

from penstock.transfer_queue import BadPayload, Lease, LeaseLost, QueueError, Trajectory

ROOMY = replace(LIMITS, group_size=4)


def kinds(refusals: Sequence[QueueError | None]) -> list[type | None]:
    return [None if refusal is None else type(refusal) for refusal in refusals]


def same_work(found: Trajectory, sent: Trajectory) -> bool:
    return (found.episode_id, found.reward) == (sent.episode_id, sent.reward) and same(found.segments, sent.segments)


def broken(lease: Lease) -> Trajectory:
    good = trajectory(lease)
    bad = replace(good.segments[0], response_logprobs=np.full(3, np.nan, dtype=np.float32))
    return replace(good, segments=[bad])


async def test_all_that_are_good_are_taken(make_queue) -> None:
    queue = await make_queue(ROOMY)
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 8, 0)
    await queue.journal(leases[3], turn(1), 0)
    finished = [(lease, trajectory(lease, reward=float(lease.member))) for lease in leases]
    assert await queue.complete_many(finished) == [None] * 8
    status = await queue.status()
    assert (status.episodes["completed"], status.groups["ready"], status.workers) == (8, 2, {})
    batch = await train(queue, 0)
    found = await queue.read([name for group in batch.groups for name in group])
    assert all(map(same_work, found, [each for _, each in finished]))
    await queue.commit(1)
    assert (await queue.status()).bytes == 0


async def test_each_is_refused_for_itself(make_queue) -> None:
    """A lost lease, arrays that cannot be, versions that are not published: the others are taken."""
    queue = await make_queue(ROOMY)
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 8, 0)
    await queue.release(leases[1])
    works = [trajectory(lease) for lease in leases]
    works[2], works[5] = broken(leases[2]), trajectory(leases[5], version=9)
    works[6] = replace(works[6], reward=None, outcome=trajectory(leases[6], reward=None).outcome)
    refusals = await queue.complete_many(list(zip(leases, works, strict=True)))
    assert kinds(refusals) == [None, LeaseLost, BadPayload, None, None, BadPayload, None, None]
    assert leases[1].episode_id in str(refusals[1])
    assert "response_logprobs" in str(refusals[2])
    assert "version 9 is newer" in str(refusals[5])
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["leased"], status.episodes["queued"]) == (5, 2, 1)
    again = [(lease, trajectory(lease)) for lease in (leases[2], leases[5])]
    assert await queue.complete_many(again) == [None, None]


async def test_a_repeat_keeps_what_was_taken_first(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 2, 0)
    await queue.complete(leases[0], trajectory(leases[0], reward=0.25))
    assert await queue.complete_many([(lease, trajectory(lease, reward=0.5)) for lease in leases]) == [None, None]
    assert await queue.complete_many([(lease, trajectory(lease, reward=0.75)) for lease in leases]) == [None, None]
    assert (await queue.status()).episodes["completed"] == 2
    assert [one.reward for one in await queue.read([lease.episode_id for lease in leases])] == [0.25, 0.5]


async def test_of_two_owners_the_newer_is_taken(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (old,) = await queue.lease_episodes("old", 1, 0)
    await queue.release(old)
    (new,) = await queue.lease_episodes("new", 1, 0)
    finished = [(old, trajectory(old, reward=0.0)), (new, trajectory(new, reward=1.0))]
    assert kinds(await queue.complete_many(finished)) == [LeaseLost, None]
    assert [one.reward for one in await queue.read([new.episode_id])] == [1.0]


async def test_one_lease_twice_is_refused_before_anything_is_taken(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    one, other = await queue.lease_episodes("worker", 2, 0)
    with pytest.raises(QueueError, match=one.episode_id):
        await queue.complete_many([(lease, trajectory(lease)) for lease in (one, other, one)])
    assert (await queue.status()).episodes["completed"] == 0


async def test_none_at_all(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.complete_many([]) == []


async def test_more_than_one_round_trip_holds(make_queue) -> None:
    """Payloads in one key and in several, of which some fill a round trip alone; other splits among them."""
    queue = await make_queue(ROOMY)
    await queue.submit([*tasks(2), task(0, "eval/1"), task(1, "eval/1")])
    leases = await queue.lease_episodes("worker", 10, 0)
    sizes = [2, 60_000, 2, 150_000, 300_000, 2, 2, 60_000, 60_000, 2]
    finished = [
        (lease, trajectory(lease, reward=float(place), tokens=tokens))
        for place, (lease, tokens) in enumerate(zip(leases, sizes, strict=True))
    ]
    assert await queue.complete_many(finished) == [None] * 10
    found = await queue.read([lease.episode_id for lease in leases])
    assert all(map(same_work, found, [each for _, each in finished]))
    assert (await queue.status()).other_splits == {"eval/1": {"queued": 0, "leased": 0, "done": 2}}


async def test_nothing_is_taken_without_a_run(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 2, 0)
    await queue.drop_run()
    with pytest.raises(QueueError):
        await queue.complete_many([(lease, trajectory(lease)) for lease in leases])
