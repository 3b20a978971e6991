"""What `TransferQueue` promises of episodes whose workers die. One suite for memory, Redis and a Redis Cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from queue_samples import LIMITS, at, task, tasks, trajectory

from penstock.transfer_queue import Batch, Lease, Outcome, OutcomeKind, TransferQueue

TTL_S = 0.05
SHORT = replace(LIMITS, group_size=3, lease_ttl_s=TTL_S, max_lost_leases=4)
POISON = "train/0000#1"


async def run_out() -> None:
    await asyncio.sleep(2 * TTL_S)


async def die(queue: TransferQueue, worker: str, count: int) -> list[Lease]:
    """A worker takes episodes and is never heard of again."""
    leases = await queue.lease_episodes(worker, count, 0)
    await run_out()
    return leases


async def work(queue: TransferQueue, worker: str) -> list[str]:
    """The episodes that a worker took: all of them are finished, unless one of them kills it."""
    leases = await queue.lease_episodes(worker, 12, 0)
    names = [lease.episode_id for lease in leases]
    if POISON in names:
        await run_out()
        return names
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    return names


async def test_a_poison_row_becomes_a_dead_letter(make_queue) -> None:
    queue = await make_queue(SHORT)
    await queue.submit(tasks(4), cursor=at(4))
    company = []
    for turn in range(30):
        names = await work(queue, f"w{turn % 2}")
        company += [len(names)] if POISON in names else []
    assert company == [12, 12, 8, 1]
    (letter,) = await queue.dead_letters()
    assert (letter.episode_id, letter.outcome.kind) == (POISON, OutcomeKind.INFRA_ERROR)
    assert all(name in letter.outcome.reason for name in ("w0", "w1"))
    assert await queue.dead_letter(POISON) == letter
    assert await queue.dead_letter("train/0000#0") is None
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["failed"]) == (11, 1)
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    assert batch.groups[0] == ["train/0000#0", "train/0000#2"]


async def test_a_poison_row_of_another_split_ends_too(make_queue) -> None:
    queue = await make_queue(SHORT)
    await queue.submit([task(0, "eval/0")])
    for _ in range(4):
        (lease,) = await die(queue, "worker", 4)
        assert lease.task.split == "eval/0"
    assert await queue.lease_episodes("worker", 4, 0) == []
    (letter,) = await queue.dead_letters()
    reason = "4 workers died or fell silent while they ran it: worker, worker, worker, worker"
    assert (letter.episode_id, letter.outcome) == ("eval/0/0000#0", Outcome(OutcomeKind.INFRA_ERROR, reason, "worker"))
    status = await queue.status()
    assert status.other_splits == {"eval/0": {"queued": 0, "leased": 0, "done": 1}}
    assert (status.episodes["killed_workers"], status.episodes["failed"]) == (1, 0)


async def test_a_row_of_poison_takes_no_healthy_episode_along(make_queue) -> None:
    """Every episode of a row ends its worker; all others are finished, by many workers or by one."""
    queue = await make_queue(replace(SHORT, groups_per_step=8))
    await queue.submit(tasks(8), cursor=at(8))
    poison = {f"train/0003#{member}" for member in range(3)}
    deaths = 0
    for turn in range(60):
        leases = await queue.lease_episodes(f"w{turn % 5}", 10, 0)
        if poison & {lease.episode_id for lease in leases}:
            deaths += 1
            await run_out()
            continue
        for lease in leases:
            await queue.complete(lease, trajectory(lease))
    assert {letter.episode_id for letter in await queue.dead_letters()} == poison
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["failed"]) == (21, 3)
    assert deaths <= 10, "a worker may be restarted ten times"


async def test_released_leases_are_not_lost(make_queue) -> None:
    queue = await make_queue(SHORT)
    await queue.submit(tasks(1), cursor=at(1))
    for _ in range(6):
        leases = await queue.lease_episodes("worker", 3, 0)
        assert len(leases) == 3
        for lease in leases:
            await queue.release(lease)
    assert await queue.dead_letters() == []


async def test_a_lease_taken_up_again_is_not_lost(make_queue) -> None:
    """As after a pause of Redis: the lease ran out, and its worker continues."""
    queue = await make_queue(SHORT)
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 1, 0)
    for _ in range(4):
        await run_out()
        assert await queue.lease_episodes("other", 0, 0) == []  # takes expired leases back
        assert await queue.renew(leases) == []
    await queue.complete(leases[0], trajectory(leases[0]))
    assert await queue.dead_letters() == []


async def test_renewing_forgives_no_lost_lease(make_queue) -> None:
    queue = await make_queue(SHORT)
    await queue.submit([task(0, "eval/0")])
    for _ in range(4):
        (lease,) = await queue.lease_episodes("worker", 1, 0)
        assert await queue.renew([lease]) == []
        await run_out()
    assert await queue.lease_episodes("worker", 1, 0) == []
    assert [letter.episode_id for letter in await queue.dead_letters()] == [lease.episode_id]


@pytest.mark.parametrize("split", ["train", "eval/0"])
async def test_an_episode_that_lost_three_leases_waits_for_a_worker_alone(make_queue, split: str) -> None:
    """Busy workers are given nothing meanwhile, no group is admitted in vain, and its worker runs nothing beside it."""
    queue = await make_queue(replace(SHORT, lease_ttl_s=0.5, groups_per_step=4))
    await queue.submit([task(0, split), task(1), task(2)])
    for _ in range(3):
        (lost,) = await queue.lease_episodes("dead", 1, 0)
        await asyncio.sleep(0.6)
    (lost,) = await queue.lease_episodes("first", 5, 0)
    (busy,) = await queue.lease_episodes("busy", 1, 0)
    await queue.release(lost)
    admitted = (await queue.status()).groups["admitted"]
    assert await queue.lease_episodes("busy", 5, 0) == []
    assert (await queue.status()).groups["admitted"] == admitted
    await queue.complete(busy, trajectory(busy))
    (alone,) = await queue.lease_episodes("busy", 5, 0)
    assert alone.episode_id == lost.episode_id
    assert await queue.lease_episodes("busy", 5, 0) == []
    await queue.complete(alone, trajectory(alone))
    assert len(await queue.lease_episodes("busy", 5, 0)) == 5


async def test_a_worker_takes_all_it_can_once_the_episode_that_lost_two_leases_has_ended(make_queue) -> None:
    """A busy worker never holds none: its other episodes must not keep the bound of one that has ended."""
    queue = await make_queue(replace(SHORT, lease_ttl_s=0.5, groups_per_step=4))
    await queue.submit(tasks(4), cursor=at(4))
    for _ in range(2):
        await queue.lease_episodes("dead", 1, 0)
        await asyncio.sleep(0.6)
    first, *others = await queue.lease_episodes("busy", 12, 0)
    assert len(others) == 7
    assert await queue.lease_episodes("busy", 5, 0) == []
    await queue.complete(first, trajectory(first))
    assert len(await queue.lease_episodes("busy", 5, 0)) == 4


async def test_a_lease_that_is_taken_up_again_and_released_leaves_no_bound(make_queue) -> None:
    """It is counted with the losses that it has then, one fewer than when it ran out."""
    queue = await make_queue(replace(SHORT, lease_ttl_s=0.5, groups_per_step=4))
    await queue.submit(tasks(4), cursor=at(4))
    for _ in range(2):
        await queue.lease_episodes("dead", 1, 0)
        await asyncio.sleep(0.6)
    (first,) = await queue.lease_episodes("busy", 1, 0)
    await asyncio.sleep(0.6)
    assert await queue.lease_episodes("other", 0, 0) == []  # takes the expired lease back
    await queue.release(first)
    (again,) = await queue.lease_episodes("other", 1, 0)
    await queue.complete(again, trajectory(again))
    assert len(await queue.lease_episodes("busy", 11, 0)) == 11
