"""Tasks, leases, journals and endings of episodes, as `TransferQueue` promises them. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from queue_samples import INFRA, LIMITS, at, expire_leases, finish_all, task, tasks, train, trajectory, turn

from penstock.transfer_queue import (
    Batch,
    DataCursor,
    JournalMismatch,
    Lease,
    LeaseLost,
    Outcome,
    OutcomeKind,
    QueueError,
    StepError,
    TransferQueue,
)
from penstock.transfer_queue.types import KEPT_FAILURES, OTHER_FAILURES


async def test_submit_with_a_cursor_happens_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.cursor() == DataCursor()
    assert await queue.submit(tasks(3), cursor=at(3)) == 3
    assert await queue.submit(tasks(3), cursor=at(3)) == 0
    assert await queue.submit(tasks(2, start=3), cursor=at(5)) == 2
    assert await queue.cursor() == at(5)
    assert (await queue.status()).groups["queued"] == 5


async def test_a_submission_that_would_leave_a_gap_is_refused(make_queue) -> None:
    """A queue that lost its newest tasks is not told of later ones before it has them again."""
    queue = await make_queue(LIMITS)
    assert await queue.submit(tasks(3), cursor=at(3), after=at(0)) == 3
    with pytest.raises(StepError, match="submit after 0:5: the tasks after 0:3 are not here"):
        await queue.submit(tasks(1, start=5), cursor=at(6), after=at(5))
    assert await queue.submit(tasks(3), cursor=at(3), after=at(5)) == 0  # a repeat stays a no-op
    assert await queue.submit(tasks(2, start=3), cursor=at(0, epoch=1), after=at(3)) == 2
    assert (await queue.status()).groups["submitted"] == 5
    assert await queue.submit(tasks(1, start=5), cursor=at(9)) == 0  # an epoch before
    with pytest.raises(StepError, match="submit after 2:0: the tasks after 1:0 are not here"):
        await queue.submit(tasks(1, start=5), cursor=at(1, epoch=2), after=at(0, epoch=2))
    assert await queue.submit(tasks(1, start=5), cursor=at(1, epoch=1), after=at(9)) == 1


async def test_submit_without_a_cursor_skips_known_tasks(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.submit([task(0, "eval/1"), task(1, "eval/1")]) == 2
    assert await queue.submit([task(1, "eval/1"), task(2, "eval/1")]) == 1
    assert await queue.submit([]) == 0
    assert await queue.cursor() == DataCursor()


async def test_submit_without_a_cursor_goes_in_shares(make_queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transfer_queue.redis.queue.SUBMIT_CHUNK", 2)
    queue = await make_queue(LIMITS)
    assert await queue.submit([task(number, "eval/1") for number in range(5)]) == 5
    assert await queue.submit([task(number, "eval/1") for number in range(7)]) == 2
    assert len(await queue.lease_episodes("worker", 9, 0)) == 7


async def test_tasks_arrive_as_they_were_sent(make_queue) -> None:
    queue = await make_queue(LIMITS)
    sent = replace(task(1), extra_info={"x": [1, 2.5, None, "ä"], "n": np.int64(3)}, sampling={"temperature": 0.0})
    await queue.submit([sent])
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    assert lease.task == replace(sent, extra_info={"x": [1, 2.5, None, "ä"], "n": 3})


async def test_leases_come_oldest_group_first_and_fill_groups(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(3), cursor=at(3))
    first = await queue.lease_episodes("a", 3, 0)
    second = await queue.lease_episodes("b", 2, 0)
    assert [lease.episode_id for lease in first + second] == [
        "train/0000#0",
        "train/0000#1",
        "train/0001#0",
        "train/0001#1",
        "train/0002#0",
    ]
    assert [lease.member for lease in first] == [0, 1, 0]
    assert (await queue.status()).workers == {"a": 3, "b": 2}


async def test_no_group_is_admitted_before_it_is_needed(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(3), cursor=at(3))
    for count, admitted in ((0, 0), (2, 1), (1, 2), (1, 2)):
        assert len(await queue.lease_episodes("worker", count, 0)) == count
        assert (await queue.status()).groups["admitted"] == admitted


async def test_other_splits_come_first(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    await queue.submit([task(0, "eval/1"), task(1, "eval/1", min_version=1)])
    leases = await queue.lease_episodes("worker", 3, 0)
    assert [lease.episode_id for lease in leases] == ["eval/1/0000#0", "train/0000#0", "train/0000#1"]


async def test_admission_stops_at_the_staleness_bound(make_queue) -> None:
    queue = await make_queue(LIMITS)  # staleness 1, 2 groups per step, 2 members: 4 groups, 8 episodes
    await queue.submit(tasks(10), cursor=at(10))
    assert len(await finish_all(queue)) == 8
    assert await queue.lease_episodes("worker", 1, 0) == []
    await train(queue, 0)
    assert await queue.lease_episodes("worker", 1, 0) == []  # version 0 would be due at step 1, which is full
    fresh = await queue.lease_episodes("worker", 100, 1)
    assert [lease.min_version for lease in fresh] == [1] * 4


async def test_later_members_keep_the_group_floor(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, group_size=3, groups_per_step=1))
    await queue.submit(tasks(2), cursor=at(2))
    for lease in await queue.lease_episodes("worker", 3, 0):
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)
    (first,) = await queue.lease_episodes("fresh", 1, 1)
    assert first.min_version == 1
    assert await queue.lease_episodes("stale", 5, 0) == []
    assert [lease.member for lease in await queue.lease_episodes("fresh", 5, 1)] == [1, 2]


async def test_many_tasks_that_ask_for_newer_weights_are_passed_over(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit([task(n, min_version=int(n not in (64, 200))) for n in range(201)], cursor=at(201))
    leases = await queue.lease_episodes("worker", 5, 0)
    assert [lease.task.task_id for lease in leases] == ["train/0064"] * 2 + ["train/0200"] * 2


async def test_back_pressure_holds_admission_but_never_below_one_step(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=3, max_bytes=1))
    await queue.submit(tasks(8), cursor=at(8))
    assert len(await finish_all(queue, count=2)) == 2
    assert len(await finish_all(queue)) == 2  # the second group fills one step
    assert await finish_all(queue) == []
    await train(queue, 0)
    assert len(await finish_all(queue, count=1)) == 1


async def test_expired_lease_moves_and_its_late_owner_is_refused(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (old,) = await queue.lease_episodes("old", 1, 0)
    await queue.journal(old, turn(1), 0)
    await expire_leases(queue)
    leases = await queue.lease_episodes("new", 2, 0)
    (new,) = [lease for lease in leases if lease.episode_id == old.episode_id]
    assert new.fence > old.fence
    assert (new.attempt, len(new.journal)) == (0, 1)
    for late in (queue.journal(old, turn(2), 1), queue.complete(old, trajectory(old)), queue.fail(old, INFRA)):
        with pytest.raises(LeaseLost):
            await late
    assert await queue.renew([old]) == [old.episode_id]
    await queue.complete(new, trajectory(new))
    assert (await queue.status()).episodes["expired"] == 1


async def test_only_renewed_leases_stay(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 2, 0)
    await expire_leases(queue)
    assert await queue.renew(leases[:1]) == []
    assert [lease.episode_id for lease in await queue.lease_episodes("other", 5, 0)] == [leases[1].episode_id]


async def test_release_keeps_the_journal_and_counts_no_attempt(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    for number in range(12):
        await queue.journal(lease, turn(number), number)
    await queue.release(lease)
    await queue.release(lease)
    with pytest.raises(LeaseLost):
        await queue.journal(lease, turn(99), 12)
    (again,) = await queue.lease_episodes("other", 1, 0)
    assert (again.episode_id, again.attempt) == (lease.episode_id, 0)
    assert [entry.context_len for entry in again.journal] == list(range(12))
    assert again.journal[3].context_hash == 2**64 - 4
    np.testing.assert_array_equal(again.journal[3].ids, [3, 4])
    assert again.journal[3].data == {"finish_reason": "stop"}


async def test_a_lease_is_adopted_by_its_fence_with_its_journal(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("first", 1, 0)
    assert await queue.adopt(lease.episode_id, lease.fence) == lease
    for number in range(11):
        await queue.journal(lease, turn(number), number)
    adopted = await queue.adopt(lease.episode_id, lease.fence)
    assert replace(adopted, journal=()) == replace(lease, journal=())
    assert [entry.context_len for entry in adopted.journal] == list(range(11))
    await queue.complete(adopted, trajectory(adopted))
    with pytest.raises(LeaseLost):
        await queue.adopt(lease.episode_id, lease.fence)


async def test_only_the_fence_that_holds_an_episode_adopts_it(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (old,) = await queue.lease_episodes("old", 1, 0)
    await queue.release(old)
    (new,) = await queue.lease_episodes("new", 1, 0)
    for episode_id, fence in (
        (old.episode_id, old.fence),
        (new.episode_id, new.fence + 1),
        ("train/0000#1", old.fence),  # never leased
        ("train/0000#2", 1),
        ("train/0000#7", 1),
        ("train/9999#0", 1),
        ("nonsense", 1),
    ):
        with pytest.raises(LeaseLost):
            await queue.adopt(episode_id, fence)
    assert (await queue.adopt(new.episode_id, new.fence)).fence == new.fence
    await queue.fail(new, INFRA)
    with pytest.raises(LeaseLost):
        await queue.adopt(new.episode_id, new.fence)


@pytest.mark.parametrize("episode_id", ["train/0000#1", "train/0000#7", "train/9999#0"])
async def test_what_was_never_leased_has_no_fence(make_queue, episode_id: str) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    forged = replace(lease, episode_id=episode_id, fence=0)
    with pytest.raises(LeaseLost):
        await queue.adopt(episode_id, 0)
    with pytest.raises(LeaseLost):
        await queue.journal(forged, turn(0), 0)
    with pytest.raises(LeaseLost):
        await queue.complete(forged, replace(trajectory(lease), episode_id=episode_id))
    with pytest.raises(LeaseLost):
        await queue.fail(forged, INFRA)
    assert await queue.renew([forged]) == [episode_id]
    await queue.release(forged)
    status = await queue.status()
    assert (status.workers, status.episodes["leased"], status.episodes["queued"]) == ({"worker": 1}, 1, 1)


async def test_failures_are_retried_then_given_up(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, group_size=3, groups_per_step=1))
    await queue.submit(tasks(1), cursor=at(1))
    leases = await queue.lease_episodes("worker", 3, 0)
    for lease in leases[1:]:
        await queue.complete(lease, trajectory(lease))
    lease = leases[0]
    for attempt in (0, 1, 2):
        assert lease.attempt == attempt
        await queue.journal(lease, turn(attempt), attempt)
        again = await queue.fail(lease, INFRA)
        assert await queue.fail(lease, INFRA) == again == (attempt < 2)
        if again:
            (lease,) = await queue.lease_episodes("worker", 1, 0)
    (letter,) = await queue.dead_letters()
    assert (letter.episode_id, letter.outcome, letter.attempts) == ("train/0000#0", INFRA, 3)
    assert [entry.context_len for entry in letter.journal] == [0, 1, 2]
    batch = await queue.lease_batch(0)
    assert batch == Batch(0, [["train/0000#1", "train/0000#2"]])
    with pytest.raises(QueueError, match="continued without it"):
        await queue.requeue("train/0000#0")
    episodes = (await queue.status()).episodes
    assert (episodes["retried"], episodes["failed"], episodes["completed"]) == (2, 1, 2)
    assert (await queue.status()).failures == {INFRA.failure: 3}, "each attempt once, although it was reported twice"
    await queue.commit(1)
    with pytest.raises(QueueError, match="continued without it"):
        await queue.requeue("train/0000#0")


async def test_many_different_failures_are_counted_together(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_attempts=KEPT_FAILURES + 4))
    await queue.submit(tasks(1), cursor=at(1))
    for number in [*range(KEPT_FAILURES + 2), 0]:
        lease = (await queue.lease_episodes("worker", 1, 0))[0]
        await queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, f"number {number}\nand more", "tool"))
    failures = (await queue.status()).failures
    assert (failures["tool: number 0"], failures[OTHER_FAILURES], len(failures)) == (2, 2, KEPT_FAILURES + 1)


async def test_a_group_with_too_few_rewards_dies_and_can_be_requeued(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(1), cursor=at(1))
    first, second = await queue.lease_episodes("worker", 2, 0)
    await queue.complete(first, trajectory(first))
    await queue.complete(second, trajectory(second, reward=None))
    status = await queue.status()
    assert (status.groups["dead"], status.groups["admitted"], status.unconsumed_bytes) == (1, 0, 0)
    assert status.episodes["group_failed"] == 2
    (letter,) = await queue.dead_letters()
    assert (letter.episode_id, letter.outcome.reason, letter.attempts) == (second.episode_id, "deadline", 0)
    await queue.requeue(second.episode_id)
    assert await queue.dead_letters() == []
    with pytest.raises(QueueError, match="no such dead letter"):
        await queue.requeue(second.episode_id)
    status = await queue.status()
    assert (status.groups["dead"], status.groups["queued"]) == (0, 1)
    leases = await queue.lease_episodes("worker", 5, 0)
    assert [lease.episode_id for lease in leases] == [first.episode_id, second.episode_id]
    assert leases[0].fence > first.fence


# journals -----------------------------------------------------------------------------------------------------------
async def one_lease(queue: TransferQueue) -> Lease:
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    return lease


async def kept(queue: TransferQueue, lease: Lease) -> list[int]:
    return [entry.context_len for entry in (await queue.adopt(lease.episode_id, lease.fence)).journal]


async def test_journal_refuses_an_entry_after_a_hole(make_queue) -> None:
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    with pytest.raises(JournalMismatch, match="train/0000#0: journal entry 2: the journal has 0 entries"):
        await queue.journal(lease, turn(2), 2)
    await queue.journal(lease, turn(0), 0)
    with pytest.raises(JournalMismatch, match="train/0000#0: journal entry 3") as caught:
        await queue.journal(lease, turn(3), 3)
    assert caught.value.entries == 1
    assert await kept(queue, lease) == [0]
    for number in (1, 2, 3):
        await queue.journal(lease, turn(number), number)
    assert await kept(queue, lease) == [0, 1, 2, 3]


async def test_journal_entry_is_appended_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    for number in (0, 1):
        await queue.journal(lease, turn(number), number)
    size = (await queue.status()).unconsumed_bytes
    for number in (1, 0):
        await queue.journal(lease, turn(number), number)
    assert (await queue.status()).unconsumed_bytes == size
    assert await kept(queue, lease) == [0, 1]
    again = await queue.adopt(lease.episode_id, lease.fence)
    np.testing.assert_array_equal(again.journal[1].ids, turn(1).ids)


async def test_journal_tells_a_second_writer_its_place(make_queue) -> None:
    """Two servers may serve one episode with one fence."""
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    await queue.journal(lease, turn(0), 0)
    with pytest.raises(JournalMismatch) as caught:
        await queue.journal(lease, turn(7), 0)
    assert await kept(queue, lease) == [0]
    await queue.journal(lease, turn(7), caught.value.entries)
    assert await kept(queue, lease) == [0, 7]
