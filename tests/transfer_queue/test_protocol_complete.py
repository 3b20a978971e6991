"""Several episodes that end in one call, and many calls at once: each is taken or refused for itself, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from queue_samples import LIMITS, at, same, task, tasks, train, trajectory, turn

from penstock.transfer_queue import BadPayload, Lease, LeaseLost, QueueError, Trajectory, TransferQueue

ROOMY = replace(LIMITS, group_size=4)
WIDE = replace(LIMITS, group_size=8, groups_per_step=8)


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
    assert await queue.complete_many([]) == []
    with pytest.raises(QueueError, match=one.episode_id):
        await queue.complete_many([(lease, trajectory(lease)) for lease in (one, other, one)])
    assert (await queue.status()).episodes["completed"] == 0


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


# many calls at once ------------------------------------------------------------------------------------------------
async def leased(queue: TransferQueue, groups: int) -> list[Lease]:
    await queue.submit(tasks(groups), cursor=at(groups))
    return await queue.lease_episodes("worker", 8 * groups, 0)


async def outcomes(queue: TransferQueue, finished: list[tuple[Lease, Trajectory]]) -> list[type | None]:
    found = await asyncio.gather(*(queue.complete(*one) for one in finished), return_exceptions=True)
    return [None if outcome is None else type(outcome) for outcome in found]


async def test_each_caller_has_its_own_outcome(make_queue) -> None:
    """Fenced ones, arrays that cannot be and versions that are not published, first, last and among good ones."""
    queue = await make_queue(WIDE)
    leases = await leased(queue, 4)
    finished = [(lease, trajectory(lease, reward=float(place))) for place, lease in enumerate(leases)]
    fenced, bad, early = {0, 7, 20, 31}, {3, 21}, {5, 22}
    for place in fenced:
        await queue.release(leases[place])
    newer = await queue.lease_episodes("newer", 4, 0)
    finished = [
        (lease, broken(lease) if place in bad else trajectory(lease, version=9) if place in early else work)
        for place, (lease, work) in enumerate(finished)
    ]
    expected = [LeaseLost if place in fenced else BadPayload if place in bad | early else None for place in range(32)]
    assert await outcomes(queue, finished) == expected
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["leased"]) == (24, 8)
    taken = [work for (_, work), outcome in zip(finished, expected, strict=True) if outcome is None]
    found = await queue.read([work.episode_id for work in taken])
    assert [one.reward for one in found] == [work.reward for work in taken]
    assert all(same(one.segments, work.segments) for one, work in zip(found, taken, strict=True))
    kept = [leases[place] for place in sorted(bad | early)]
    again = [(lease, trajectory(lease)) for lease in [*newer, *kept]]
    assert await outcomes(queue, again) == [None] * 8
    assert (await queue.status()).workers == {}


async def test_repeats_beside_each_other_count_once(make_queue) -> None:
    queue = await make_queue(WIDE)
    finished = [(lease, trajectory(lease)) for lease in await leased(queue, 1)]
    assert await outcomes(queue, [*finished, *finished, *finished]) == [None] * 24
    assert (await queue.status()).episodes["completed"] == 8


async def test_a_cancelled_caller_takes_no_other_along(make_queue) -> None:
    """Cancelled before it is sent, and at moments of its round trip; what it sent may have been taken, and once."""
    queue = await make_queue(WIDE)
    finished = [(lease, trajectory(lease)) for lease in await leased(queue, 4)]
    for turns in (0, 1, 2, 4):
        calls = [asyncio.create_task(queue.complete(*one)) for one in finished]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls[turns::3]:
            call.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all(outcome is None for outcome, call in zip(found, calls, strict=True) if not call.cancelled())
    assert await outcomes(queue, finished) == [None] * 32
    status = await queue.status()
    assert (status.episodes["completed"], status.groups["ready"], status.workers) == (32, 4, {})
