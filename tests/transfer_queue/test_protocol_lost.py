"""What `TransferQueue` promises of episodes whose workers die. One suite for memory, Redis and a Redis Cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_samples import LIMITS, at, expire_leases, task, tasks, trajectory

from penstock.transfer_queue import Batch, Lease, Outcome, OutcomeKind, TransferQueue

LOSING = replace(LIMITS, group_size=3, max_lost_leases=4)
WIDE = replace(LOSING, groups_per_step=8)
POISON = "train/0000#1"


async def lose(queue: TransferQueue, times: int) -> None:
    """A worker leases the first episode and dies, so many times."""
    for _ in range(times):
        assert len(await queue.lease_episodes("dead", 1, 0)) == 1
        await expire_leases(queue)


async def finish(queue: TransferQueue, leases: list[Lease]) -> None:
    for lease in leases:
        await queue.complete(lease, trajectory(lease))


async def work(queue: TransferQueue, worker: str, count: int, poison: set[str]) -> list[str]:
    """A worker finishes what it leases, unless an episode of `poison` kills it. Returns what it leased."""
    leases = await queue.lease_episodes(worker, count, 0)
    names = [lease.episode_id for lease in leases]
    await (expire_leases(queue) if poison & set(names) else finish(queue, leases))
    return names


async def test_a_poison_row_becomes_a_dead_letter(make_queue) -> None:
    queue = await make_queue(LOSING)
    await queue.submit(tasks(4), cursor=at(4))
    leased = [await work(queue, f"w{turn % 2}", 12, {POISON}) for turn in range(30)]
    assert [len(names) for names in leased if POISON in names] == [12, 12, 8, 1]
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
    queue = await make_queue(LOSING)
    await queue.submit([task(0, "eval/0")])
    await lose(queue, 4)
    assert await queue.lease_episodes("worker", 4, 0) == []
    (letter,) = await queue.dead_letters()
    reason = "4 workers died or fell silent while they ran it: dead, dead, dead, dead"
    assert (letter.episode_id, letter.outcome) == ("eval/0/0000#0", Outcome(OutcomeKind.INFRA_ERROR, reason, "worker"))
    status = await queue.status()
    assert status.other_splits == {"eval/0": {"queued": 0, "leased": 0, "done": 1}}
    assert (status.episodes["killed_workers"], status.episodes["failed"]) == (1, 0)


async def test_a_row_of_poison_takes_no_healthy_episode_along(make_queue) -> None:
    queue = await make_queue(WIDE)
    await queue.submit(tasks(8), cursor=at(8))
    poison = {f"train/0003#{member}" for member in range(3)}
    leased = [await work(queue, f"w{turn % 5}", 10, poison) for turn in range(60)]
    assert {letter.episode_id for letter in await queue.dead_letters()} == poison
    status = await queue.status()
    assert (status.episodes["completed"], status.episodes["failed"]) == (21, 3)
    assert sum(bool(poison & set(names)) for names in leased) <= 10, "a worker may be restarted ten times"


async def test_released_leases_are_not_lost(make_queue) -> None:
    queue = await make_queue(LOSING)
    await queue.submit(tasks(1), cursor=at(1))
    for _ in range(6):
        leases = await queue.lease_episodes("worker", 3, 0)
        assert len(leases) == 3
        for lease in leases:
            await queue.release(lease)
    assert await queue.dead_letters() == []


async def test_a_lease_taken_up_again_is_not_lost(make_queue) -> None:
    """As after a pause of Redis: the lease ran out, and its worker continues."""
    queue = await make_queue(LOSING)
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 1, 0)
    for number in range(4):
        await expire_leases(queue)
        assert await queue.lease_episodes("other", 0, 0) == []  # takes expired leases back
        status = await queue.status()
        assert (status.episodes["queued"], status.workers) == (3, {})
        if number % 2:
            assert await queue.renew(leases) == []
        else:
            assert await queue.adopt(leases[0].episode_id, leases[0].fence) == leases[0]
        assert (await queue.status()).workers == {"worker": 1}
    await finish(queue, leases)
    assert await queue.dead_letters() == []


async def test_renewing_forgives_no_lost_lease(make_queue) -> None:
    queue = await make_queue(LOSING)
    await queue.submit([task(0, "eval/0")])
    for _ in range(4):
        (lease,) = await queue.lease_episodes("worker", 1, 0)
        assert await queue.renew([lease]) == []
        await expire_leases(queue)
    assert await queue.lease_episodes("worker", 1, 0) == []
    assert [letter.episode_id for letter in await queue.dead_letters()] == [lease.episode_id]


@pytest.mark.parametrize("split", ["train", "eval/0"])
async def test_an_episode_that_lost_three_leases_runs_alone_at_the_emptiest_worker(make_queue, split: str) -> None:
    queue = await make_queue(WIDE)
    await queue.submit([task(0, split), *tasks(7, start=1)])
    await lose(queue, 3)
    (lost,) = await queue.lease_episodes("first", 5, 0)
    emptiest = await queue.lease_episodes("emptiest", 1, 0)
    busy = await queue.lease_episodes("busy", 2, 0)
    await queue.release(lost)
    busy += await queue.lease_episodes("busy", 5, 0)
    assert len(busy) == 7, "a worker that is not the emptiest takes the next ones, of new groups too"
    assert lost.episode_id not in {lease.episode_id for lease in busy}
    assert await queue.lease_episodes("emptiest", 5, 0) == []
    await finish(queue, emptiest)
    (alone,) = await queue.lease_episodes("emptiest", 5, 0)
    assert alone.episode_id == lost.episode_id
    admitted = (await queue.status()).groups["admitted"]
    assert await queue.lease_episodes("emptiest", 5, 0) == []
    assert (await queue.status()).groups["admitted"] == admitted, "no group is admitted in vain"
    await queue.complete(alone, trajectory(alone))
    assert len(await queue.lease_episodes("emptiest", 5, 0)) == 5


async def test_of_workers_that_hold_the_same_one_waits_for_an_episode_that_must_run_alone(make_queue) -> None:
    queue = await make_queue(WIDE)
    await queue.submit(tasks(6), cursor=at(6))
    await lose(queue, 3)
    (lost,) = await queue.lease_episodes("first", 1, 0)
    for worker in ("a", "b"):
        assert len(await queue.lease_episodes(worker, 2, 0)) == 2
    await queue.release(lost)
    assert await queue.lease_episodes("a", 3, 0) == []
    assert len(await queue.lease_episodes("b", 3, 0)) == 3


async def test_while_an_episode_waits_to_run_alone_others_that_lost_leases_wait_too(make_queue) -> None:
    queue = await make_queue(WIDE)
    await queue.submit(tasks(2), cursor=at(2))
    await lose(queue, 3)
    (alone,) = await queue.lease_episodes("first", 1, 0)
    (once,) = await queue.lease_episodes("dead", 1, 0)
    emptiest = await queue.lease_episodes("emptiest", 1, 0)
    busy = await queue.lease_episodes("busy", 2, 0)
    await expire_leases(queue)
    assert await queue.renew([alone, *emptiest, *busy]) == []
    await queue.release(alone)
    more = await queue.lease_episodes("busy", 9, 0)
    assert [lease.episode_id for lease in more] == ["train/0001#2"]
    await finish(queue, [*emptiest, *busy, *more])
    for suspect in (alone, once):
        (lease,) = await queue.lease_episodes("busy", 9, 0)
        assert lease.episode_id == suspect.episode_id
        await finish(queue, [lease])


async def test_a_worker_that_holds_many_passes_over_all_that_lost_two_leases(make_queue) -> None:
    """70 episodes: more than Redis looks at in one read of the queue."""
    queue = await make_queue(replace(LIMITS, group_size=70))
    await queue.submit(tasks(4), cursor=at(4))
    await queue.lease_episodes("dead", 70, 0)
    await expire_leases(queue)
    suspects = await queue.lease_episodes("dead", 70, 0)
    light = await queue.lease_episodes("light", 9, 0)
    busy = await queue.lease_episodes("busy", 61, 0)
    await expire_leases(queue)
    assert await queue.renew([*light, *busy]) == []
    more = await queue.lease_episodes("busy", 70, 0)
    assert [lease.task.task_id for lease in more] == ["train/0002"] * 70
    assert await queue.lease_episodes("light", 20, 0) == []
    free = await queue.lease_episodes("free", 20, 0)
    assert [lease.episode_id for lease in free] == [lease.episode_id for lease in suspects[:8]]


async def test_a_worker_takes_all_it_can_once_the_episode_that_lost_two_leases_has_ended(make_queue) -> None:
    queue = await make_queue(WIDE)
    await queue.submit(tasks(4), cursor=at(4))
    await lose(queue, 2)
    first, *others = await queue.lease_episodes("busy", 12, 0)
    assert len(others) == 7
    assert await queue.lease_episodes("busy", 5, 0) == []
    await queue.complete(first, trajectory(first))
    assert len(await queue.lease_episodes("busy", 5, 0)) == 4


async def test_a_lease_that_is_taken_up_again_and_released_leaves_no_bound(make_queue) -> None:
    """It is counted with the losses that it has then, one fewer than when it ran out."""
    queue = await make_queue(WIDE)
    await queue.submit(tasks(4), cursor=at(4))
    await lose(queue, 2)
    (first,) = await queue.lease_episodes("busy", 1, 0)
    await expire_leases(queue)
    assert await queue.lease_episodes("other", 0, 0) == []  # takes the expired lease back
    await queue.release(first)
    (again,) = await queue.lease_episodes("other", 1, 0)
    await queue.complete(again, trajectory(again))
    assert len(await queue.lease_episodes("busy", 11, 0)) == 11
