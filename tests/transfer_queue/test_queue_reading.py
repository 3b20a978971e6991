"""What `TransferQueue` promises of reading by field, spilling, and catching up. One suite for all stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from queue_samples import LIMITS, at, finish_all, tasks, train, trajectory

from penstock.transfer_queue import Announcement, BadPayload, Batch, LeaseLost, QueueError, StepError

BIG = 400_000
"""Sampled tokens of an episode whose payload is stored in several pieces (3.6 MB)."""


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


async def test_groups_that_came_to_be_over_age_by_catching_up_are_dropped(make_queue) -> None:
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
