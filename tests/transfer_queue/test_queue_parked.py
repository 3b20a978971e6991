"""Queued groups that a quota holds back."""

from __future__ import annotations

from dataclasses import replace

from queue_samples import at, task, trajectory

from penstock.transfer_queue import Batch, Limits

LIMITS = Limits(group_size=2, groups_per_step=2, max_staleness=2)


async def test_groups_beyond_their_quotas_room_are_parked(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, quotas={"b": 1}))
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
