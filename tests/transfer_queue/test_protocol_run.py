"""What `TransferQueue` promises of a run: its identity, its configuration, and that one head owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from queue_samples import LEASE, LIMITS, tasks, trajectory

from penstock.transfer_queue import Announcement, NoSuchRun, QueueError, RunIdentity, RunTaken, TransferQueue

MINE = RunIdentity("a1b2", "hash-of-mine", "Qwen3-0.6B")
THEIRS = RunIdentity("c3d4", "hash-of-theirs", "Llama-3.2-1B")
TTL_S = 0.2


async def owned(make_queue) -> TransferQueue:
    """An empty queue in which MINE has been created."""
    queue: TransferQueue = await make_queue(LIMITS)
    await queue.drop_run()
    assert await queue.create_run(LIMITS, "config: mine", MINE) is None
    return queue


async def test_a_stranger_with_equal_limits_is_refused(make_queue) -> None:
    queue = await owned(make_queue)
    with pytest.raises(RunTaken) as refused:
        await queue.create_run(LIMITS, "config: theirs", THEIRS)
    for named in (MINE.run_id, MINE.config_hash, MINE.model, THEIRS.run_id, THEIRS.config_hash, THEIRS.model):
        assert named in str(refused.value)
    assert await queue.config() == "config: mine"


async def test_the_same_recipe_from_another_folder_is_refused(make_queue) -> None:
    queue = await owned(make_queue)
    with pytest.raises(RunTaken, match="c3d4"):
        await queue.create_run(LIMITS, "config: mine", replace(MINE, run_id="c3d4"))


async def test_a_run_keeps_its_model(make_queue) -> None:
    queue = await owned(make_queue)
    with pytest.raises(RunTaken, match="Llama"):
        await queue.create_run(LIMITS, "config: mine", replace(MINE, model="Llama-3.2-1B"))


async def test_a_resumed_run_is_found_with_its_new_settings(make_queue) -> None:
    queue = await owned(make_queue)
    changed = replace(MINE, config_hash="hash-of-a-lower-rate")
    await asyncio.sleep(0.05)
    found = await queue.create_run(LIMITS, "config: lower", changed)
    assert found is not None
    assert found.identity == MINE
    assert 0.04 <= found.age_s <= 60
    assert await queue.config() == "config: lower"
    again = await queue.create_run(LIMITS, "config: lower", changed)
    assert again is not None
    assert again.identity == changed
    with pytest.raises(QueueError, match="max_staleness"):
        await queue.create_run(replace(LIMITS, max_staleness=5), "config: lower", changed)


async def test_without_an_identity_the_configuration_decides(make_queue) -> None:
    queue = await owned(make_queue)
    assert await queue.create_run(LIMITS, "config: mine") is not None
    with pytest.raises(RunTaken, match="a1b2"):
        await queue.create_run(LIMITS, "config: theirs")


async def test_a_second_head_is_refused_while_the_first_lives(make_queue) -> None:
    queue = await make_queue(LIMITS)
    assert await queue.claim_head("first", 30.0) is None
    assert await queue.claim_head("first", 30.0) is None  # renewed
    head = await queue.claim_head("second", 30.0)
    assert head is not None
    assert head.holder == "first"
    assert 0 < head.left_s <= 30.0


async def test_a_head_is_replaced_after_its_lease(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.claim_head("first", TTL_S)
    async with asyncio.timeout(200):
        while await queue.claim_head("second", 30.0) is not None:
            await asyncio.sleep(TTL_S / 4)
    head = await queue.claim_head("first", TTL_S)
    assert head is not None, "the first one has lost it for good"
    assert head.holder == "second"


async def test_a_head_that_is_dead_is_replaced_at_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.claim_head("first", 30.0)
    assert await queue.claim_head("second", 30.0, dead="another") is not None
    assert await queue.claim_head("second", 30.0, dead="first") is None


async def test_a_released_head_lease_is_free(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.claim_head("first", 30.0)
    await queue.release_head("second")
    assert await queue.claim_head("second", 30.0) is not None
    await queue.release_head("first")
    assert await queue.claim_head("second", 30.0) is None


async def test_a_head_may_come_before_its_run(make_queue) -> None:
    """A stranger must be refused before it creates anything."""
    queue = await make_queue(LIMITS)
    await queue.drop_run()
    assert await queue.claim_head("first", 30.0) is None
    assert await queue.claim_head("second", 30.0) is not None


CALLS: dict[str, Callable[[TransferQueue], Awaitable[object]]] = {
    "config": lambda queue: queue.config(),
    "submit": lambda queue: queue.submit(tasks(1)),
    "lease_episodes": lambda queue: queue.lease_episodes("worker", 1, 0),
    "complete": lambda queue: queue.complete(LEASE, trajectory(LEASE)),
    "claim_training": lambda queue: queue.claim_training("trainer"),
    "check_training": lambda queue: queue.check_training(),
    "lease_batch": lambda queue: queue.lease_batch(0),
    "spill": lambda queue: queue.spill(0, ["train/0000#0"]),
    "pass_step": lambda queue: queue.pass_step(0),
    "drop_lost": lambda queue: queue.drop_lost(0, ["train/0000#0"]),
    "publish_version": lambda queue: queue.publish_version(Announcement(1, {})),
    "renew_manifest": lambda queue: queue.renew_manifest(Announcement(0, {})),
    "commit": lambda queue: queue.commit(1),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_run_that_was_dropped_is_not_begun_again(make_queue, call: str) -> None:
    """Processes that still work for it end; what they wrote would be of a run without limits."""
    queue = await make_queue(LIMITS)
    await queue.drop_run()
    with pytest.raises(NoSuchRun):
        await CALLS[call](queue)
