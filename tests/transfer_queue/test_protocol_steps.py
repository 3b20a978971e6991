"""Steps, versions, catching up, and the trainer's epoch that may write them. One suite for all stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from queue_samples import LIMITS, at, finish_all, tasks, train, trajectory

from penstock.transfer_queue import (
    Announcement,
    BadPayload,
    Batch,
    LeaseLost,
    StepError,
    TrainerFenced,
    TransferQueue,
    Waiting,
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
    await queue.commit(0)
    assert (await queue.status()).committed_step == 1, "an earlier commit takes nothing back"


async def test_commit_before_publish_counts_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(6), cursor=at(6))
    await finish_all(queue)
    await queue.lease_batch(0)
    assert await queue.renew_manifest(Announcement(0, {"path": "base"}))
    await queue.commit(1)
    assert await queue.latest_version() == Announcement(0, {"path": "base"})
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
    with pytest.raises(StepError, match=r"version 1 after 0: step 0 is .* never leased"):
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


async def test_no_version_is_left_out(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    for step in (0, 1):
        assert isinstance(await queue.lease_batch(step), Batch)
    with pytest.raises(StepError, match="version 2 after 0: step 1 is out of order"):
        await queue.publish_version(Announcement(2, {}))
    assert await queue.publish_version(Announcement(1, {}))
    assert await queue.publish_version(Announcement(2, {}))


async def test_a_step_that_is_passed_leaves_no_group_unaccounted(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(6), cursor=at(6))
    await finish_all(queue)
    await train(queue, 0)
    running, *_ = await queue.lease_episodes("w", 4, 1)
    assert await queue.pass_step(2) is False, "one step after the other"
    assert await queue.pass_step(1)
    assert await queue.pass_step(1), "a repeat"
    assert await queue.lease_batch(1) == Batch(1, [])
    assert await queue.pass_step(1)
    assert await queue.publish_version(Announcement(2, {"path": "v2"}))
    assert await queue.pass_step(1) is False, "published"
    await queue.complete(running, trajectory(running))
    assert await queue.lease_batch(2) == Waiting("0 of 2 groups ready; 2 in flight, 0 queued")
    status = await queue.status()
    groups = dict(status.groups)
    assert groups.pop("submitted") == sum(groups.values()) == 6
    assert (groups["trained"], groups["admitted"], groups["dropped_over_age"]) == (2, 2, 2), "the two due at step 1"
    await queue.commit(2)
    status = await queue.status()
    assert (status.episodes["committed"], status.episodes["dropped"], status.committed_step) == (4, 4, 2)


async def test_a_mark_changes_whenever_the_announcement_does(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.latest_mark() is None
    assert await queue.renew_manifest(Announcement(0, {"path": "base"}))
    base = await queue.latest_mark()
    assert base is not None
    assert (base.version, len(base.digest), await queue.latest_mark()) == (0, 32, base)
    await queue.submit(tasks(2), cursor=at(2))
    await finish_all(queue)
    await train(queue, 0)
    first = await queue.latest_mark()
    assert first is not None
    assert (first.version, first.digest != base.digest) == (1, True)
    assert await queue.publish_version(Announcement(1, {"path": "other"})) is False
    assert await queue.latest_mark() == first, "nothing was published"
    assert await queue.renew_manifest(Announcement(1, {"path": "elsewhere"}))
    renewed = await queue.latest_mark()
    assert renewed is not None
    assert (renewed.version, renewed.digest != first.digest) == (1, True)
    assert await queue.renew_manifest(Announcement(1, {"path": "v1"}))
    assert await queue.latest_mark() == first, "equal announcements have equal marks"


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
    assert await queue.latest_mark() is None
    with pytest.raises(LeaseLost):
        await queue.complete(running, trajectory(running))
    assert await queue.submit(tasks(4, start=4), cursor=at(8)) == 3  # train/0007 is trained already
    assert await queue.renew_manifest(Announcement(2, {"path": "v2"}))
    status = await queue.status()
    places = {name: status.groups[name] for name in ("queued", "ready", "committed", "submitted")}
    assert places == {"queued": 3, "ready": 1, "committed": 4, "submitted": 8}
    assert await queue.submit(tasks(1, start=7)) == 1, "what was trained ahead of its submission is known once"


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


async def test_catching_up_keeps_a_step_that_is_fixed_beyond(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    first, second = [await queue.lease_batch(step) for step in (0, 1)]
    await queue.commit(1, {0: first.groups})
    status = await queue.status()
    assert (status.version, status.step, status.committed_step) == (1, 2, 1)
    assert await queue.lease_batch(1) == second


async def test_batches_of_known_steps_change_nothing(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    await finish_all(queue)
    batch = await train(queue, 0)
    await queue.commit(1, {0: batch.groups})
    await queue.commit(1, {0: batch.groups})
    status = await queue.status()
    assert (status.version, status.committed_step, status.episodes["trained"]) == (1, 1, 4)
    assert await queue.latest_version() == Announcement(1, {"path": "v1"})


# the trainer's epoch ------------------------------------------------------------------------------------------------
STEP_CALLS: dict[str, Callable[[TransferQueue], Awaitable[object]]] = {
    "check": lambda queue: queue.check_training(),
    "lease": lambda queue: queue.lease_batch(1),
    "replay": lambda queue: queue.lease_batch(0),
    "publish": lambda queue: queue.publish_version(Announcement(2, {"path": "other"})),
    "publish_again": lambda queue: queue.publish_version(Announcement(1, {"path": "other"})),
    "renew": lambda queue: queue.renew_manifest(Announcement(1, {"path": "other"})),
    "pass": lambda queue: queue.pass_step(1),
    "spill": lambda queue: queue.spill(0, ["train/0000#0"]),
    "lose": lambda queue: queue.drop_lost(0, ["train/0000#0"]),
    "commit": lambda queue: queue.commit(1),
}


async def trained(make_queue) -> TransferQueue:
    queue: TransferQueue = await make_queue(LIMITS)
    await queue.submit(tasks(8), cursor=at(8))
    await finish_all(queue)
    return queue


@pytest.mark.parametrize("call", STEP_CALLS)
async def test_an_old_epoch_writes_no_step(make_queue, another_client, call: str, tmp_path: Path) -> None:
    old = await trained(make_queue)
    await old.claim_training("first on a:1")
    await train(old, 0)
    new = await another_client(old)
    await new.claim_training("second on b:2")
    before = replace(await old.status(), ages_s={})
    with pytest.raises(TrainerFenced, match="second on b:2"):
        await STEP_CALLS[call](old)
    assert replace(await old.status(), ages_s={}) == before
    assert await new.latest_version() == Announcement(1, {"path": "v1"})
    assert list(tmp_path.rglob("*.batch*")) == [], "the log is the new trainer's"


async def test_without_a_claim_every_client_may_train(make_queue, another_client) -> None:
    first = await trained(make_queue)
    batch = await first.lease_batch(0)
    second = await another_client(first)
    second.join_training(0)
    assert await second.lease_batch(0) == batch
    assert await first.publish_version(Announcement(1, {}))


async def test_the_newest_epoch_goes_on(make_queue, another_client) -> None:
    old = await trained(make_queue)
    await old.claim_training("first")
    batch = await train(old, 0)
    new = await another_client(old)
    await new.claim_training("second")
    await finish_all(new, version=1)
    assert await new.lease_batch(0) == batch
    assert isinstance(await new.lease_batch(1), Batch)
    assert await new.publish_version(Announcement(2, {"path": "v2"}))
    await new.spill(0, ["train/0000#0"])
    await new.commit(2)


async def test_a_version_names_one_set_of_weights(make_queue, another_client) -> None:
    """Both have trained step 0; the older one comes to publish after the newer one has."""
    old = await trained(make_queue)
    await old.claim_training("first")
    await old.lease_batch(0)
    new = await another_client(old)
    await new.claim_training("second")
    await new.lease_batch(0)
    assert await new.publish_version(Announcement(1, {"path": "new"}))
    for publish in (old.publish_version, old.renew_manifest):
        with pytest.raises(TrainerFenced):
            await publish(Announcement(1, {"path": "old"}))
    assert await new.latest_version() == Announcement(1, {"path": "new"})


async def test_epochs_grow_and_ranks_share_one(make_queue, another_client) -> None:
    queue = await trained(make_queue)
    first = await queue.claim_training("rank 0")
    rank = await another_client(queue)
    with pytest.raises(TrainerFenced, match="without an epoch"):
        await rank.lease_batch(0)
    rank.join_training(first)
    assert await rank.lease_batch(0) == await queue.lease_batch(0)
    assert await queue.claim_training("rank 0 again") > first
    with pytest.raises(TrainerFenced):
        await rank.lease_batch(0)


async def test_a_claim_that_the_queue_forgot_counts(make_queue, another_client) -> None:
    """Redis lost its last second with the claim; what the epoch's holder writes next brings it back."""
    queue = await trained(make_queue)
    held = await queue.claim_training("first") + 10
    queue.join_training(held)
    await queue.lease_batch(0)
    older = await another_client(queue)
    older.join_training(held - 1)
    with pytest.raises(TrainerFenced):
        await older.lease_batch(0)
