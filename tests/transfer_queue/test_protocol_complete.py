"""Many calls of `complete` at once: each is taken or refused for itself, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from queue_samples import LIMITS, at, same, tasks, trajectory

from penstock.transfer_queue import BadPayload, Lease, LeaseLost, Trajectory, TransferQueue

WIDE = replace(LIMITS, group_size=8, groups_per_step=8)


def broken(lease: Lease) -> Trajectory:
    good = trajectory(lease)
    bad = replace(good.segments[0], response_logprobs=np.full(3, np.nan, dtype=np.float32))
    return replace(good, segments=[bad])


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
