"""What `TransferQueue` promises of steps and versions. One suite for memory, Redis and a Redis Cluster.

What `TransferQueue` promises of reading by field, spilling, and catching up. One suite for all stores.

Servers, splits and numbers in a `TransferQueue`: one suite for memory, Redis and a Redis Cluster.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from queue_samples import INFRA, LIMITS, at, finish_all, task, tasks, train, trajectory, turn

from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    Batch,
    LeaseLost,
    QueueError,
    ServerInfo,
    StepError,
    Waiting,
    WeightUpdate,
)


async def test_a_batch_is_fixed_once_and_the_same_for_everybody(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    assert await queue.lease_batch(0) == Waiting("0 of 2 groups ready; 0 in flight, 4 queued")
    await finish_all(queue)
    batch = await queue.lease_batch(0)
    assert batch == Batch(0, [["train/0000#0", "train/0000#1"], ["train/0001#0", "train/0001#1"]])
    assert await queue.lease_batch(0) == batch
    assert [t.episode_id for t in await queue.read(batch.groups[1])] == ["train/0001#0", "train/0001#1"]


async def test_one_step_ahead_and_no_more(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=2))
    await queue.submit(tasks(6), cursor=at(6))
    await finish_all(queue)
    with pytest.raises(StepError, match="step 1: the next one is 0"):
        await queue.lease_batch(1)
    assert isinstance(await queue.lease_batch(0), Batch)
    assert isinstance(await queue.lease_batch(1), Batch)
    assert await queue.lease_batch(2) == Waiting("version 1 is not published yet; only one step ahead is leased")
    await train(queue, 0)
    assert isinstance(await queue.lease_batch(2), Batch)


async def test_a_fixed_step_ahead_closes_its_places(make_queue) -> None:
    """Version 1, step 1 fixed: a server at version 0 with staleness 1 would have to ship at step 1. Too late."""
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    await finish_all(queue)
    await train(queue, 0)
    assert isinstance(await queue.lease_batch(1), Batch)
    assert await queue.lease_episodes("stale", 10, 0) == []
    assert len(await queue.lease_episodes("fresh", 10, 1)) == 4


async def test_wait_holds_a_batch_for_slow_groups_that_are_due(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=1))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)  # groups 1 and 2; group 0 runs, group 3 is ready, both due at step 1
    for lease in await queue.lease_episodes("worker", 8, 1):
        await queue.complete(lease, trajectory(lease))
    assert await queue.lease_batch(1) == Waiting("slow groups are due: train/0000 by step 1")
    await queue.complete(slow, trajectory(slow))
    batch = await queue.lease_batch(1)
    assert [group[0] for group in batch.groups] == ["train/0000#0", "train/0003#0"]


async def test_drop_gives_up_groups_over_the_bound(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_staleness=0, overage="drop", groups_per_step=1))
    await queue.submit(tasks(3), cursor=at(3))
    slow, other = await queue.lease_episodes("worker", 5, 0)
    await queue.complete(other, trajectory(other))
    await queue.journal(slow, turn(1))
    await queue.release(slow)
    (slow,) = await queue.lease_episodes("worker", 1, 0)
    assert await queue.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    assert await queue.lease_batch(0) == Waiting("0 of 1 groups ready; 1 in flight, 2 queued")
    await queue.complete(slow, trajectory(slow))
    await train(queue, 0)
    late, _ = await queue.lease_episodes("worker", 5, 1)
    assert await queue.lease_batch(1) == Waiting("0 of 1 groups ready; 1 in flight, 1 queued")
    assert await queue.renew([late]) == []


async def test_drop_counts_what_it_drops(make_queue) -> None:
    """Staleness 1, two groups per step. The slow group 0 is due at step 1; steps 0 and 1 ship without it."""
    queue = await make_queue(replace(LIMITS, overage="drop"))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    await train(queue, 0)
    await finish_all(queue, version=1)
    await train(queue, 1)
    await finish_all(queue, version=2)
    await train(queue, 2)
    status = await queue.status()
    assert status.groups["dropped_over_age"] == 1
    assert status.episodes["dropped"] == 1  # of its two members one had finished
    assert status.episodes["leased"] == 0
    with pytest.raises(LeaseLost):
        await queue.complete(slow, trajectory(slow))


async def test_mask_ships_late_groups_and_lets_others_pass(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, overage="mask"))
    await queue.submit(tasks(8), cursor=at(8))
    slow, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    for step in (0, 1, 2):
        await train(queue, step)
        await finish_all(queue, version=step + 1)
    await queue.complete(slow, trajectory(slow))
    batch = await queue.lease_batch(3)
    assert batch.groups[0] == ["train/0000#0", "train/0000#1"]


async def test_commit_leaves_only_counters(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(2), cursor=at(2))
    await finish_all(queue)
    batch = await train(queue, 0)
    assert (await queue.status()).bytes > 0
    await queue.commit(1)
    await queue.commit(1)
    status = await queue.status()
    assert (status.bytes, status.committed_step) == (0, 1)
    assert (status.groups["committed"], status.groups["trained"]) == (2, 0)
    assert (status.episodes["committed"], status.episodes["trained"]) == (4, 4)
    with pytest.raises(StepError):
        await queue.lease_batch(0)
    with pytest.raises(BadPayload, match="committed"):
        await queue.read(batch.groups[0])
    with pytest.raises(StepError):
        await queue.commit(7)


async def test_commit_before_publish_counts_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(6), cursor=at(6))
    await finish_all(queue)
    await queue.lease_batch(0)
    await queue.commit(1)
    assert await queue.publish_version(Announcement(1, {}))
    status = await queue.status()
    assert (status.episodes["trained"], status.episodes["committed"]) == (4, 4)
    assert (status.groups["shipped"], status.groups["trained"], status.groups["committed"]) == (0, 0, 2)


async def test_rewind_hands_the_recorded_batches_out_again(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    await finish_all(queue)
    batches = [await train(queue, 0)]
    await finish_all(queue, version=1)
    batches.append(await train(queue, 1))
    await queue.commit(1)
    assert await queue.rewind(1) == 1
    assert await queue.lease_batch(1) == batches[1]
    assert await queue.publish_version(Announcement(2, {})) is False
    assert len(await queue.read([one for group in batches[1].groups for one in group])) == 4
    with pytest.raises(StepError, match="rewind to 0"):
        await queue.rewind(0)
    with pytest.raises(StepError, match="rewind to 3"):
        await queue.rewind(3)
    assert (await queue.status()).episodes["trained"] == 8


async def test_versions_are_published_in_order_and_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.latest_version() is None
    assert await queue.renew_manifest(Announcement(0, {"path": "base"}))
    assert await queue.publish_version(Announcement(0, {})) is False
    with pytest.raises(StepError, match="never leased"):
        await queue.publish_version(Announcement(1, {}))
    await queue.submit(tasks(2), cursor=at(2))
    await finish_all(queue)
    await train(queue, 0)
    assert await queue.latest_version() == Announcement(1, {"path": "v1"})
    assert await queue.publish_version(Announcement(1, {"path": "other"})) is False
    assert await queue.renew_manifest(Announcement(0, {})) is False
    assert await queue.renew_manifest(Announcement(1, {"path": "elsewhere", "tensors": [{"name": "w"}]}))
    latest = await queue.latest_version()
    assert latest is not None
    assert latest.manifest == {"path": "elsewhere", "tensors": [{"name": "w"}]}


BIG = 130_000
"""Sampled tokens of an episode whose payload is stored in several pieces (2.7 MB)."""


async def complete_one(queue, tokens: int):
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    sent = trajectory(lease, tokens=tokens)
    rng = np.random.default_rng(tokens)
    noisy = replace(sent.segments[0], response_logprobs=-rng.random(tokens + 1, dtype=np.float32))
    sent = replace(sent, segments=[noisy])
    await queue.complete(lease, sent)
    return sent


# fields ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [3, 3000, BIG])
async def test_fields_come_without_the_others(make_queue, tokens: int) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, tokens)
    (values,) = await queue.get([sent.episode_id], ["response_mask", "response_logprobs", "reward"])
    assert (values.episode_id, dict(values.plain)) == (sent.episode_id, {"reward": 1.0})
    (segment,) = values.segments
    assert sorted(segment) == ["response_logprobs", "response_mask"]
    np.testing.assert_array_equal(segment["response_mask"], sent.segments[0].response_mask)
    np.testing.assert_array_equal(segment["response_logprobs"], sent.segments[0].response_logprobs)


@pytest.mark.parametrize("tokens", [3, 3000, BIG])
async def test_slices_are_those_of_the_whole(make_queue, tokens: int) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, tokens)
    whole = sent.segments[0]
    for start, stop in ((0, 1), (1, 3), (tokens - 1, None), (tokens // 2, tokens // 2 + 100), (tokens + 9, None)):
        (values,) = await queue.get([sent.episode_id], ["response_ids", "prompt_ids"], start, stop)
        np.testing.assert_array_equal(values.segments[0]["response_ids"], whole.response_ids[start:stop])
        np.testing.assert_array_equal(values.segments[0]["prompt_ids"], whole.prompt_ids)


async def test_big_payloads_come_back_as_they_were_sent(make_queue) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, BIG)
    (found,) = await queue.read([sent.episode_id])
    np.testing.assert_array_equal(found.segments[0].response_ids, sent.segments[0].response_ids)
    np.testing.assert_array_equal(found.segments[0].response_logprobs, sent.segments[0].response_logprobs)
    assert found.metrics == {"tool_calls": 1}


async def test_unknown_fields_are_named(make_queue) -> None:
    queue = await make_queue(LIMITS)
    sent = await complete_one(queue, 3)
    with pytest.raises(QueueError, match=r"response_maks.*response_mask"):
        await queue.get([sent.episode_id], ["response_maks"])
    with pytest.raises(BadPayload, match="no payload"):
        await queue.get(["train/0000#1"], ["response_mask"])
    assert await queue.get([], ["response_mask"]) == []


# spilling ----------------------------------------------------------------------------------------------------------
async def test_spilled_payloads_leave_the_store_and_are_still_read(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    for lease in await queue.lease_episodes("worker", 4, 0):
        await queue.complete(lease, trajectory(lease, tokens=5000))
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    episodes = [name for group in batch.groups for name in group]
    with pytest.raises(StepError, match="version 1 is not published"):
        await queue.spill(0, episodes)
    await queue.publish_version(Announcement(1, {}))
    before = await queue.read(episodes)
    held = (await queue.status()).bytes
    assert await queue.spill(0, episodes[:1]) == 1  # each rank spills its share
    assert await queue.spill(0, episodes) == 3
    assert await queue.spill(0, episodes) == 0
    status = await queue.status()
    assert (status.episodes["spilled"], status.groups["trained"]) == (4, 2)
    assert held - status.bytes > 4 * 5000 * 9
    assert await queue.held() == set(episodes)
    after = await queue.read([episodes[2], episodes[0]])
    assert repr(after) == repr([before[2], before[0]])
    (values,) = await queue.get([episodes[1]], ["response_ids"], 10, 12)
    assert values.segments[0]["response_ids"].tolist() == [10, 11]
    assert await queue.rewind(0) == 1
    assert await queue.lease_batch(0) == batch
    await queue.commit(1)
    with pytest.raises(BadPayload, match="committed"):
        await queue.read(episodes)


async def test_only_the_step_s_own_episodes_are_spilled(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    finished = await finish_all(queue)
    await train(queue, 0)
    assert await queue.spill(0, [finished[-1], "train/9999#0"]) == 0
    assert len(await queue.read([finished[-1]])) == 1


# catching up -------------------------------------------------------------------------------------------------------
async def test_a_queue_behind_its_checkpoint_catches_up(make_queue) -> None:
    """Steps 0 and 1 are in a checkpoint; this queue has lost step 1, one of its groups still runs, one is unknown."""
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    running, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    batch = await queue.lease_batch(0)  # groups 1 and 2; group 0 runs, group 3 is ready
    assert isinstance(batch, Batch)
    recorded = {0: batch.groups, 1: [["train/0000#0", "train/0000#1"], ["train/0007#0", "train/0007#1"]]}
    with pytest.raises(StepError, match="step 1 was never leased"):
        await queue.commit(2)
    await queue.commit(2, recorded)
    status = await queue.status()
    assert (status.version, status.step, status.committed_step) == (2, 2, 2)
    assert (status.groups["committed"], status.groups["ready"], status.groups["admitted"]) == (4, 1, 0)
    assert (status.episodes["trained"], status.episodes["committed"]) == (8, 8)
    assert await queue.latest_version() is None
    with pytest.raises(LeaseLost):
        await queue.complete(running, trajectory(running))
    assert await queue.submit(tasks(4, start=4), cursor=at(8)) == 3  # train/0007 is trained already
    assert await queue.renew_manifest(Announcement(2, {"path": "v2"}))
    status = await queue.status()
    places = {name: status.groups[name] for name in ("queued", "ready", "committed", "submitted")}
    assert places == {"queued": 3, "ready": 1, "committed": 4, "submitted": 8}


async def test_groups_over_age_after_catching_up_are_dropped(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    await queue.commit(3, {0: [["train/0000#0"]], 1: [["train/0001#0"]], 2: [["train/0002#0"]]})
    await queue.lease_batch(3)
    status = await queue.status()
    assert (status.groups["dropped_over_age"], status.episodes["dropped"]) == (1, 2)


async def test_a_lost_publication_is_caught_up_with(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    batch = await queue.lease_batch(0)
    assert isinstance(batch, Batch)
    await queue.commit(1, {0: batch.groups})
    status = await queue.status()
    assert (status.version, status.step, status.committed_step) == (1, 1, 1)
    assert (status.episodes["trained"], status.episodes["committed"]) == (4, 4)
    assert await queue.publish_version(Announcement(1, {})) is False
    assert await queue.renew_manifest(Announcement(1, {"path": "v1"}))


async def test_batches_of_known_steps_change_nothing(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    batch = await train(queue, 0)
    await queue.commit(1, {0: batch.groups})
    await queue.commit(1, {0: batch.groups})
    status = await queue.status()
    assert (status.version, status.committed_step, status.episodes["trained"]) == (1, 1, 4)


async def test_servers_live_as_long_as_they_beat(make_queue) -> None:
    queue = await make_queue(LIMITS)
    one, two = ServerInfo("one", "http://a", 1, 3, True, 900), ServerInfo("two", "http://b", 0, 0, False)
    await queue.heartbeat(two)
    await queue.heartbeat(one)
    assert await queue.servers() == [one, two]
    await queue.deregister("two")
    assert await queue.servers() == [one]
    async with asyncio.timeout(60):
        while await queue.servers():
            await asyncio.sleep(0.1)


async def test_updates_are_kept_in_order(make_queue) -> None:
    queue = await make_queue(LIMITS)
    reported = [WeightUpdate("one", version, 0.02, 0.1, 0.01, version) for version in (1, 2, 2)]
    for update in reported:
        await queue.report_update(update)
    assert await queue.updates() == reported


async def test_only_the_newest_updates_are_kept(make_queue, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 20
    for module in ("memory", "redis.queue"):
        monkeypatch.setattr(f"penstock.transfer_queue.{module}.KEPT_UPDATES", kept)
    queue = await make_queue(LIMITS)
    for version in range(kept + 3):
        await queue.report_update(WeightUpdate("one", version, 0.02, 0.1, 0.01, 0))
    assert [update.version for update in await queue.updates()] == list(range(3, kept + 3))


async def test_a_split_collects_results_and_goes_away(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_attempts=1))
    await queue.submit([task(number, "eval/1") for number in range(3)])
    leases = await queue.lease_episodes("worker", 3, 0)
    await queue.complete(leases[0], trajectory(leases[0], reward=0.5))
    done, out = await queue.results("eval/1")
    assert ([t.episode_id for t in done], out) == (["eval/1/0000#0"], 2)
    assert await queue.fail(leases[1], INFRA) is False
    await queue.release(leases[2])
    assert (await queue.results("eval/1"))[1] == 1
    status = await queue.status()
    assert status.other_splits == {"eval/1": {"queued": 1, "leased": 0, "done": 2}}
    assert status.episodes["completed"] == 0
    await queue.drop_split("eval/1")
    status = await queue.status()
    assert (status.other_splits, status.bytes, await queue.dead_letters()) == ({}, 0, [])
    assert await queue.results("eval/1") == ([], 0)
    with pytest.raises(QueueError):
        await queue.drop_split("train")


async def test_a_dead_evaluation_episode_can_be_requeued(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_attempts=1))
    await queue.submit([task(0, "eval/1")])
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    await queue.fail(lease, INFRA)
    await queue.requeue(lease.episode_id)
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    await queue.complete(lease, trajectory(lease))
    done, out = await queue.results("eval/1")
    assert (len(done), out) == (1, 0)


async def test_waits_add_up(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.add_wait("trainer", "batch: slow", 0.5)
    await queue.add_wait("trainer", "batch: slow", 0.25)
    await queue.add_wait("agent", "admission", 1.0)
    assert (await queue.status()).waits_s == {"trainer:batch: slow": 0.75, "agent:admission": 1.0}


async def test_bytes_follow_tasks_journals_and_payloads(make_queue) -> None:
    queue = await make_queue(LIMITS)

    async def held() -> tuple[int, int]:
        status = await queue.status()
        return status.bytes, status.unconsumed_bytes

    assert await held() == (0, 0)
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    queued, waiting = await held()
    assert (queued > 500, waiting) == (True, 0)
    await queue.journal(lease, turn(1))
    journaled, waiting = await held()
    assert journaled - queued == waiting > 100
    await queue.complete(lease, trajectory(lease, tokens=5000))
    finished, waiting = await held()
    assert finished - queued == waiting
    assert 5000 * 21 < waiting < 1.2 * 5000 * 21  # 9 bytes a token, and here 12 of spans


async def test_held_names_finished_episodes_until_committed(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(LIMITS.groups_per_step), cursor=at(LIMITS.groups_per_step))
    assert await queue.held() == set()
    finished = await finish_all(queue)
    assert await queue.held() == set(finished)
    await train(queue, 0)
    assert await queue.held() == set(finished)
    await queue.commit(1)
    assert await queue.held() == set()
