"""One suite for both ledgers: what `Ledger` promises, operation by operation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from ledger_samples import INFRA, LIMITS, task, tasks, trajectory, turn

from penstock.transfer_queue.ledger import (
    Announcement,
    BadPayload,
    Batch,
    LeaseLost,
    Ledger,
    LedgerError,
    ServerInfo,
    StepError,
    Waiting,
    WeightUpdate,
)


async def finish_all(ledger: Ledger, count: int = 100, version: int = 0) -> list[str]:
    """Lease and complete everything that may run; returns the episodes."""
    leases = await ledger.lease_episodes("worker", count, version)
    for lease in leases:
        await ledger.complete(lease, trajectory(lease))
    return [lease.episode_id for lease in leases]


async def train(ledger: Ledger, step: int) -> Batch:
    batch = await ledger.lease_batch(step)
    assert isinstance(batch, Batch), batch
    assert await ledger.publish_version(Announcement(step + 1, {"path": f"v{step + 1}"}))
    return batch


# the run -----------------------------------------------------------------------------------------------------------
async def test_a_run_is_created_once_and_keeps_its_limits(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.create_run(LIMITS, "config: 2")
    assert await ledger.config() == "config: 2"
    with pytest.raises(LedgerError, match="max_staleness"):
        await ledger.create_run(replace(LIMITS, max_staleness=5), "config: 2")


async def test_nothing_works_without_a_run(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.drop_run()
    with pytest.raises(LedgerError):
        await ledger.config()
    with pytest.raises(LedgerError):
        await ledger.submit(tasks(1))


# submit ------------------------------------------------------------------------------------------------------------
async def test_submit_with_a_cursor_happens_once(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    assert await ledger.cursor() == 0
    assert await ledger.submit(tasks(3), cursor=3) == 3
    assert await ledger.submit(tasks(3), cursor=3) == 0
    assert await ledger.submit(tasks(2, start=3), cursor=5) == 2
    assert await ledger.cursor() == 5
    assert (await ledger.status()).groups["queued"] == 5


async def test_submit_without_a_cursor_skips_known_tasks(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    assert await ledger.submit([task(0, "eval/1"), task(1, "eval/1")]) == 2
    assert await ledger.submit([task(1, "eval/1"), task(2, "eval/1")]) == 1
    assert await ledger.cursor() == 0


async def test_tasks_arrive_as_they_were_sent(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    sent = replace(task(1), extra_info={"x": [1, 2.5, None, "ä"], "n": np.int64(3)}, sampling={"temperature": 0.0})
    await ledger.submit([sent])
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    assert lease.task == replace(sent, extra_info={"x": [1, 2.5, None, "ä"], "n": 3})


@pytest.mark.parametrize("bad", ["", "two words", "new\nline", "x" * 300])
async def test_task_names_that_the_ledger_cannot_keep_are_refused(make_ledger, bad: str) -> None:
    ledger = await make_ledger(LIMITS)
    with pytest.raises(LedgerError, match="task_id"):
        await ledger.submit([replace(task(1), task_id=bad)])


async def test_a_field_that_is_not_plain_data_is_named(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    with pytest.raises(BadPayload, match=r"train/0001: ground_truth.*object"):
        await ledger.submit([replace(task(1), ground_truth=object())])


# leases ------------------------------------------------------------------------------------------------------------
async def test_leases_come_oldest_group_first_and_fill_groups(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(3), cursor=3)
    first = await ledger.lease_episodes("a", 3, 0)
    second = await ledger.lease_episodes("b", 2, 0)
    assert [lease.episode_id for lease in first + second] == [
        "train/0000#0",
        "train/0000#1",
        "train/0001#0",
        "train/0001#1",
        "train/0002#0",
    ]
    assert [lease.member for lease in first] == [0, 1, 0]
    assert (await ledger.status()).workers == {"a": 3, "b": 2}


async def test_other_lanes_come_first(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    await ledger.submit([task(0, "eval/1"), task(1, "eval/1", min_version=1)])
    leases = await ledger.lease_episodes("worker", 3, 0)
    assert [lease.episode_id for lease in leases] == ["eval/1/0000#0", "train/0000#0", "train/0000#1"]


async def test_admission_stops_at_the_staleness_bound(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)  # staleness 1, 2 groups per step, 2 members: 4 groups, 8 episodes
    await ledger.submit(tasks(10), cursor=10)
    assert len(await finish_all(ledger)) == 8
    assert await ledger.lease_episodes("worker", 1, 0) == []
    await train(ledger, 0)
    assert await ledger.lease_episodes("worker", 1, 0) == []  # version 0 would be due at step 1, which is full
    fresh = await ledger.lease_episodes("worker", 100, 1)
    assert [lease.min_version for lease in fresh] == [1] * 4


async def test_later_members_keep_the_group_floor(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, group_size=3, groups_per_step=1))
    await ledger.submit(tasks(2), cursor=2)
    for lease in await ledger.lease_episodes("worker", 3, 0):
        await ledger.complete(lease, trajectory(lease))
    await train(ledger, 0)
    (first,) = await ledger.lease_episodes("fresh", 1, 1)
    assert first.min_version == 1
    assert await ledger.lease_episodes("stale", 5, 0) == []
    assert [lease.member for lease in await ledger.lease_episodes("fresh", 5, 1)] == [1, 2]


async def test_tasks_may_ask_for_newer_weights(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit([task(0, min_version=1), task(1)], cursor=2)
    leases = await ledger.lease_episodes("worker", 5, 0)
    assert [lease.episode_id for lease in leases] == ["train/0001#0", "train/0001#1"]


async def test_back_pressure_holds_admission_but_never_below_one_step(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_staleness=3, max_bytes=1))
    await ledger.submit(tasks(8), cursor=8)
    assert len(await finish_all(ledger, count=2)) == 2
    assert len(await finish_all(ledger)) == 2  # the second group fills one step
    assert await finish_all(ledger) == []
    await train(ledger, 0)
    assert len(await finish_all(ledger, count=1)) == 1


async def test_an_expired_lease_goes_elsewhere_and_the_late_owner_is_refused(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, lease_ttl_s=0.05))
    await ledger.submit(tasks(1), cursor=1)
    (old,) = await ledger.lease_episodes("old", 1, 0)
    await ledger.journal(old, turn(1))
    await asyncio.sleep(0.1)
    leases = await ledger.lease_episodes("new", 2, 0)
    (new,) = [lease for lease in leases if lease.episode_id == old.episode_id]
    assert new.fence > old.fence
    assert (new.attempt, len(new.journal)) == (0, 1)
    for late in (ledger.journal(old, turn(2)), ledger.complete(old, trajectory(old)), ledger.fail(old, INFRA)):
        with pytest.raises(LeaseLost):
            await late
    assert await ledger.renew([old]) == [old.episode_id]
    await ledger.complete(new, trajectory(new))
    assert (await ledger.status()).episodes["expired"] == 1


async def test_an_expired_lease_that_nobody_took_is_still_good(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, lease_ttl_s=0.05))
    await ledger.submit(tasks(1), cursor=1)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    await asyncio.sleep(0.1)
    assert await ledger.lease_episodes("other", 0, 0) == []  # takes expired leases back
    assert (await ledger.status()).episodes["queued"] == 2
    assert await ledger.renew([lease]) == []
    assert (await ledger.status()).workers == {"worker": 1}
    await ledger.complete(lease, trajectory(lease))


async def test_renewed_leases_stay(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, lease_ttl_s=0.3))
    await ledger.submit(tasks(1), cursor=1)
    leases = await ledger.lease_episodes("worker", 2, 0)
    for _ in range(4):
        await asyncio.sleep(0.12)
        assert await ledger.renew(leases) == []
        assert await ledger.lease_episodes("other", 5, 0) == []


async def test_release_keeps_the_journal_and_counts_no_attempt(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    for number in range(12):
        await ledger.journal(lease, turn(number))
    await ledger.release(lease)
    await ledger.release(lease)
    with pytest.raises(LeaseLost):
        await ledger.journal(lease, turn(99))
    (again,) = await ledger.lease_episodes("other", 1, 0)
    assert (again.episode_id, again.attempt) == (lease.episode_id, 0)
    assert [entry.context_len for entry in again.journal] == list(range(12))
    assert again.journal[3].context_hash == 2**64 - 4
    np.testing.assert_array_equal(again.journal[3].ids, [3, 4])
    assert again.journal[3].data == {"finish_reason": "stop"}


# endings -----------------------------------------------------------------------------------------------------------
async def test_complete_twice_is_once(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    await ledger.complete(lease, trajectory(lease, reward=0.25))
    await ledger.complete(lease, trajectory(lease, reward=0.75))
    assert (await ledger.status()).episodes["completed"] == 1
    (kept,) = await ledger.read([lease.episode_id])
    assert kept.reward == 0.25


async def test_a_refused_trajectory_leaves_the_episode_leased(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    good = trajectory(lease)
    broken = replace(good.segments[0], response_logprobs=np.full(3, np.nan, dtype=np.float32))
    with pytest.raises(BadPayload, match="response_logprobs"):
        await ledger.complete(lease, replace(good, segments=[broken]))
    with pytest.raises(BadPayload, match="version 9 is newer"):
        await ledger.complete(lease, trajectory(lease, version=9))
    assert (await ledger.status()).episodes["leased"] == 1
    await ledger.complete(lease, good)
    assert (await ledger.read([lease.episode_id]))[0].reward == 1.0


async def test_failures_are_retried_then_given_up(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, group_size=3, groups_per_step=1))
    await ledger.submit(tasks(1), cursor=1)
    leases = await ledger.lease_episodes("worker", 3, 0)
    for lease in leases[1:]:
        await ledger.complete(lease, trajectory(lease))
    lease = leases[0]
    for attempt in (0, 1, 2):
        assert lease.attempt == attempt
        await ledger.journal(lease, turn(attempt))
        again = await ledger.fail(lease, INFRA)
        assert await ledger.fail(lease, INFRA) == again == (attempt < 2)
        if again:
            (lease,) = await ledger.lease_episodes("worker", 1, 0)
    (letter,) = await ledger.dead_letters()
    assert (letter.episode_id, letter.outcome, letter.attempts) == ("train/0000#0", INFRA, 3)
    assert [entry.context_len for entry in letter.journal] == [0, 1, 2]
    batch = await ledger.lease_batch(0)
    assert batch == Batch(0, [["train/0000#1", "train/0000#2"]])
    with pytest.raises(LedgerError, match="went on without it"):
        await ledger.requeue("train/0000#0")
    episodes = (await ledger.status()).episodes
    assert (episodes["retried"], episodes["failed"], episodes["completed"]) == (2, 1, 2)


async def test_a_group_with_too_few_rewards_dies_and_can_be_requeued(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    first, second = await ledger.lease_episodes("worker", 2, 0)
    await ledger.complete(first, trajectory(first))
    await ledger.complete(second, trajectory(second, reward=None))
    status = await ledger.status()
    assert (status.groups["dead"], status.groups["admitted"], status.bytes) == (1, 0, 0)
    (letter,) = await ledger.dead_letters()
    assert (letter.episode_id, letter.outcome.reason) == (second.episode_id, "deadline")
    await ledger.requeue(second.episode_id)
    assert await ledger.dead_letters() == []
    with pytest.raises(LedgerError, match="no such dead letter"):
        await ledger.requeue(second.episode_id)
    status = await ledger.status()
    assert (status.groups["dead"], status.groups["queued"]) == (0, 1)
    leases = await ledger.lease_episodes("worker", 5, 0)
    assert [lease.episode_id for lease in leases] == [first.episode_id, second.episode_id]
    assert leases[0].fence > first.fence


# steps -------------------------------------------------------------------------------------------------------------
async def test_a_batch_is_fixed_once_and_the_same_for_everybody(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(4), cursor=4)
    assert await ledger.lease_batch(0) == Waiting("0 of 2 groups ready; 0 in flight, 4 queued")
    await finish_all(ledger)
    batch = await ledger.lease_batch(0)
    assert batch == Batch(0, [["train/0000#0", "train/0000#1"], ["train/0001#0", "train/0001#1"]])
    assert await ledger.lease_batch(0) == batch
    assert [t.episode_id for t in await ledger.read(batch.groups[1])] == ["train/0001#0", "train/0001#1"]


async def test_one_step_ahead_and_no_more(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_staleness=2))
    await ledger.submit(tasks(6), cursor=6)
    await finish_all(ledger)
    with pytest.raises(StepError, match="step 1: the next one is 0"):
        await ledger.lease_batch(1)
    assert isinstance(await ledger.lease_batch(0), Batch)
    assert isinstance(await ledger.lease_batch(1), Batch)
    assert await ledger.lease_batch(2) == Waiting("version 1 is not published yet; only one step ahead is leased")
    await train(ledger, 0)
    assert isinstance(await ledger.lease_batch(2), Batch)


async def test_a_fixed_step_ahead_closes_its_places(make_ledger) -> None:
    """Version 1, step 1 fixed: a server at version 0 with staleness 1 would have to ship at step 1. Too late."""
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(8), cursor=8)
    await finish_all(ledger)
    await train(ledger, 0)
    assert isinstance(await ledger.lease_batch(1), Batch)
    assert await ledger.lease_episodes("stale", 10, 0) == []
    assert len(await ledger.lease_episodes("fresh", 10, 1)) == 4


async def test_wait_holds_a_batch_for_slow_groups_that_are_due(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_staleness=1))
    await ledger.submit(tasks(8), cursor=8)
    slow, *rest = await ledger.lease_episodes("worker", 8, 0)
    for lease in rest:
        await ledger.complete(lease, trajectory(lease))
    await train(ledger, 0)  # groups 1 and 2; group 0 runs, group 3 is ready, both due at step 1
    for lease in await ledger.lease_episodes("worker", 8, 1):
        await ledger.complete(lease, trajectory(lease))
    assert await ledger.lease_batch(1) == Waiting("slow groups are due: train/0000 by step 1")
    await ledger.complete(slow, trajectory(slow))
    batch = await ledger.lease_batch(1)
    assert [group[0] for group in batch.groups] == ["train/0000#0", "train/0003#0"]


async def test_drop_gives_up_groups_over_the_bound(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_staleness=0, overage="drop", groups_per_step=1))
    await ledger.submit(tasks(3), cursor=3)
    slow, other = await ledger.lease_episodes("worker", 5, 0)
    await ledger.complete(other, trajectory(other))
    await ledger.journal(slow, turn(1))
    await ledger.release(slow)
    (slow,) = await ledger.lease_episodes("worker", 1, 0)
    assert await ledger.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    assert await ledger.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    await ledger.complete(slow, trajectory(slow))
    await train(ledger, 0)
    late, _ = await ledger.lease_episodes("worker", 5, 1)
    assert await ledger.lease_batch(1) == Waiting("0 of 1 groups ready; 1 in flight, 1 queued")
    assert await ledger.renew([late]) == []


async def test_drop_counts_what_it_drops(make_ledger) -> None:
    """Staleness 1, two groups per step. The slow group 0 is due at step 1; steps 0 and 1 ship without it."""
    ledger = await make_ledger(replace(LIMITS, overage="drop"))
    await ledger.submit(tasks(8), cursor=8)
    slow, *rest = await ledger.lease_episodes("worker", 8, 0)
    for lease in rest:
        await ledger.complete(lease, trajectory(lease))
    await train(ledger, 0)
    await finish_all(ledger, version=1)
    await train(ledger, 1)
    await finish_all(ledger, version=2)
    await train(ledger, 2)
    status = await ledger.status()
    assert status.groups["dropped_over_age"] == 1
    assert status.episodes["dropped"] == 2
    assert status.episodes["leased"] == 0
    with pytest.raises(LeaseLost):
        await ledger.complete(slow, trajectory(slow))


async def test_mask_ships_late_groups_and_lets_others_pass(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, overage="mask"))
    await ledger.submit(tasks(8), cursor=8)
    slow, *rest = await ledger.lease_episodes("worker", 8, 0)
    for lease in rest:
        await ledger.complete(lease, trajectory(lease))
    for step in (0, 1, 2):
        await train(ledger, step)
        await finish_all(ledger, version=step + 1)
    await ledger.complete(slow, trajectory(slow))
    batch = await ledger.lease_batch(3)
    assert batch.groups[0] == ["train/0000#0", "train/0000#1"]


async def test_commit_leaves_only_counters(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(2), cursor=2)
    await finish_all(ledger)
    batch = await train(ledger, 0)
    assert (await ledger.status()).bytes > 0
    await ledger.commit(1)
    await ledger.commit(1)
    status = await ledger.status()
    assert (status.bytes, status.committed_step) == (0, 1)
    assert (status.groups["committed"], status.groups["trained"]) == (2, 0)
    assert (status.episodes["committed"], status.episodes["trained"]) == (4, 4)
    with pytest.raises(StepError):
        await ledger.lease_batch(0)
    with pytest.raises(BadPayload, match="committed"):
        await ledger.read(batch.groups[0])
    with pytest.raises(StepError):
        await ledger.commit(7)


async def test_commit_before_publish_counts_once(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(6), cursor=6)
    await finish_all(ledger)
    await ledger.lease_batch(0)
    await ledger.commit(1)
    assert await ledger.publish_version(Announcement(1, {}))
    status = await ledger.status()
    assert (status.episodes["trained"], status.episodes["committed"]) == (4, 4)
    assert (status.groups["shipped"], status.groups["trained"], status.groups["committed"]) == (0, 0, 2)


async def test_rewind_hands_the_recorded_batches_out_again(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(8), cursor=8)
    await finish_all(ledger)
    batches = [await train(ledger, 0)]
    await finish_all(ledger, version=1)
    batches.append(await train(ledger, 1))
    await ledger.commit(1)
    assert await ledger.rewind(1) == 1
    assert await ledger.lease_batch(1) == batches[1]
    assert await ledger.publish_version(Announcement(2, {})) is False
    assert len(await ledger.read([one for group in batches[1].groups for one in group])) == 4
    with pytest.raises(StepError, match="rewind to 0"):
        await ledger.rewind(0)
    with pytest.raises(StepError, match="rewind to 3"):
        await ledger.rewind(3)
    assert (await ledger.status()).episodes["trained"] == 8


async def test_versions_are_published_in_order_and_once(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    assert await ledger.latest_version() is None
    assert await ledger.renew_manifest(Announcement(0, {"path": "base"}))
    assert await ledger.publish_version(Announcement(0, {})) is False
    with pytest.raises(StepError, match="never leased"):
        await ledger.publish_version(Announcement(1, {}))
    await ledger.submit(tasks(2), cursor=2)
    await finish_all(ledger)
    await train(ledger, 0)
    assert await ledger.latest_version() == Announcement(1, {"path": "v1"})
    assert await ledger.publish_version(Announcement(1, {"path": "other"})) is False
    assert await ledger.renew_manifest(Announcement(0, {})) is False
    assert await ledger.renew_manifest(Announcement(1, {"path": "elsewhere", "tensors": [{"name": "w"}]}))
    latest = await ledger.latest_version()
    assert latest is not None
    assert latest.manifest == {"path": "elsewhere", "tensors": [{"name": "w"}]}


# servers, lanes, watching ------------------------------------------------------------------------------------------
async def test_servers_live_as_long_as_they_beat(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)  # time to live 0.3 s
    one, two = ServerInfo("one", "http://a", 1, 3, True), ServerInfo("two", "http://b", 0, 0, False)
    await ledger.heartbeat(two)
    await ledger.heartbeat(one)
    assert await ledger.servers() == [one, two]
    await ledger.deregister("two")
    assert await ledger.servers() == [one]
    await asyncio.sleep(0.4)
    assert await ledger.servers() == []


async def test_updates_are_kept_in_order(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    reported = [WeightUpdate("one", version, 0.02, 0.1, 0.01, version) for version in (1, 2, 2)]
    for update in reported:
        await ledger.report_update(update)
    assert await ledger.updates() == reported


async def test_a_lane_collects_results_and_goes_away(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_attempts=1))
    await ledger.submit([task(number, "eval/1") for number in range(3)])
    leases = await ledger.lease_episodes("worker", 3, 0)
    await ledger.complete(leases[0], trajectory(leases[0], reward=0.5))
    done, out = await ledger.results("eval/1")
    assert ([t.episode_id for t in done], out) == (["eval/1/0000#0"], 2)
    assert await ledger.fail(leases[1], INFRA) is False
    await ledger.release(leases[2])
    assert (await ledger.results("eval/1"))[1] == 1
    status = await ledger.status()
    assert status.other_lanes == {"eval/1": {"queued": 1, "leased": 0, "done": 2}}
    assert status.episodes["completed"] == 0
    await ledger.drop_lane("eval/1")
    status = await ledger.status()
    assert (status.other_lanes, status.bytes, await ledger.dead_letters()) == ({}, 0, [])
    assert await ledger.results("eval/1") == ([], 0)
    with pytest.raises(LedgerError):
        await ledger.drop_lane("train")


async def test_a_dead_evaluation_episode_can_be_requeued(make_ledger) -> None:
    ledger = await make_ledger(replace(LIMITS, max_attempts=1))
    await ledger.submit([task(0, "eval/1")])
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    await ledger.fail(lease, INFRA)
    await ledger.requeue(lease.episode_id)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    await ledger.complete(lease, trajectory(lease))
    done, out = await ledger.results("eval/1")
    assert (len(done), out) == (1, 0)


async def test_waits_add_up(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.add_wait("trainer", "batch: slow", 0.5)
    await ledger.add_wait("trainer", "batch: slow", 0.25)
    await ledger.add_wait("agent", "admission", 1.0)
    assert (await ledger.status()).waits_s == {"trainer:batch: slow": 0.75, "agent:admission": 1.0}


async def test_bytes_are_those_of_journals_and_payloads(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(1), cursor=1)
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    await ledger.journal(lease, turn(1))
    with_journal = (await ledger.status()).bytes
    await ledger.complete(lease, trajectory(lease, tokens=5000))
    assert 100 < with_journal < 1000 < 5000 * 9 < (await ledger.status()).bytes


async def test_held_names_finished_episodes_until_their_step_is_committed(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(LIMITS.groups_per_step), cursor=LIMITS.groups_per_step)
    assert await ledger.held() == set()
    finished = await finish_all(ledger)
    assert await ledger.held() == set(finished)
    await train(ledger, 0)
    assert await ledger.held() == set(finished)
    await ledger.commit(1)
    assert await ledger.held() == set()
