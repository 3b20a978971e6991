"""What `TransferQueue` promises of its trainer: one epoch may write steps, an older one is fenced off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from queue_samples import LIMITS, at, finish_all, tasks, train

from penstock.transfer_queue import Announcement, Batch, TrainerFenced, TransferQueue

STEP_CALLS: dict[str, Callable[[TransferQueue], Awaitable[object]]] = {
    "check": lambda queue: queue.check_training(),
    "lease": lambda queue: queue.lease_batch(1),
    "replay": lambda queue: queue.lease_batch(0),
    "publish": lambda queue: queue.publish_version(Announcement(2, {"path": "other"})),
    "publish_again": lambda queue: queue.publish_version(Announcement(1, {"path": "other"})),
    "renew": lambda queue: queue.renew_manifest(Announcement(1, {"path": "other"})),
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
