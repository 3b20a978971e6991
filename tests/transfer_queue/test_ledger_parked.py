"""Queued groups that a quota holds back."""

from __future__ import annotations

from dataclasses import replace

from ledger_samples import at, task, trajectory

from penstock.transfer_queue.ledger import Batch, Limits

LIMITS = Limits(group_size=2, groups_per_step=2, max_staleness=2)


async def test_groups_beyond_their_quotas_room_are_parked(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, quotas={"b": 1}))
    sources = ["b", "b", "a", "b"]
    await ledger.submit([replace(task(n), data_source=source) for n, source in enumerate(sources)], cursor=at(4))
    assert ((await ledger.status()).parked, (await ledger.status()).groups["queued"]) == (2, 4)
    leases = await ledger.lease_episodes("w", 100, 0)
    assert len(leases) == 4
    assert ((await ledger.status()).parked, (await ledger.status()).groups["queued"]) == (2, 2)
    for lease in leases:
        await ledger.complete(lease, trajectory(lease))
    assert isinstance(await ledger.lease_batch(0), Batch)
    assert ((await ledger.status()).parked, (await ledger.status()).groups["queued"]) == (1, 2)
