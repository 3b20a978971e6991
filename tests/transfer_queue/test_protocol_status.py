"""Servers, splits and numbers in a `TransferQueue`. One suite for all stores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from queue_samples import INFRA, LIMITS, at, task, tasks, trajectory, turn

from penstock.transfer_queue import (
    QueueError,
    ServerInfo,
    WeightUpdate,
)


async def test_servers_live_as_long_as_they_beat(make_queue, store) -> None:
    queue = await make_queue(LIMITS)
    one, two = ServerInfo("one", "http://a", 1, 3, True, 900), ServerInfo("two", "http://b", 0, 0, False)
    await queue.heartbeat(two)
    await queue.heartbeat(one)
    began = time.monotonic()
    await asyncio.sleep(0.05)
    assert await queue.servers() == [one, two]
    ages = [info.age_s for info in await queue.servers()]
    assert all(0.04 <= age_s <= time.monotonic() - began + 60.0 for age_s in ages)
    await queue.deregister("two")
    assert await queue.servers() == [one]
    setattr(queue, *(("_registry_ttl_s", 0.1) if store is None else ("_registry_ttl_ms", 100)))
    await queue.heartbeat(one)
    async with asyncio.timeout(200):
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
    for module in ("testing.memory_run", "transfer_queue.redis.queue"):
        monkeypatch.setattr(f"penstock.{module}.KEPT_UPDATES", kept)
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


async def test_waits_add_up(make_queue) -> None:
    queue = await make_queue(LIMITS)
    await queue.add_wait("trainer", "batch: slow", 0.5)
    await queue.add_wait("trainer", "batch: slow", 0.25)
    await queue.add_wait("agent", "admission", 1.0)
    assert (await queue.status()).waits_s == {"trainer:batch: slow": 0.75, "agent:admission": 1.0}


async def test_a_proven_reward_is_known_to_every_client_of_the_run(make_queue, another_client) -> None:
    queue, other_run = await make_queue(LIMITS), await make_queue(LIMITS)
    another = await another_client(queue)
    assert not await another.is_reward_proven("judge 1f mine")
    for _ in range(2):
        await queue.prove_reward("judge 1f mine")
    assert await another.is_reward_proven("judge 1f mine")
    assert not await another.is_reward_proven("judge 1f another")
    assert not await other_run.is_reward_proven("judge 1f mine")


async def test_ages_are_of_the_state_that_a_group_is_in(make_queue) -> None:
    """A stall's diagnosis names where groups stand still: an age begins again with each state."""
    queue, clock = await make_queue(replace(LIMITS, group_size=1)), asyncio.get_running_loop().time

    async def ages() -> dict[str, float]:
        return dict((await queue.status()).ages_s)

    assert await ages() == {}
    await queue.submit(tasks(2), cursor=at(2))
    await asyncio.sleep(1)
    leased = clock()
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    found = await ages()
    assert found["admitted"] <= clock() - leased + 0.1
    assert found["queued"] > 0.9, "the second group, which still is"
    await asyncio.sleep(1)
    assert (await ages())["admitted"] > 0.9
    completed = clock()
    await queue.complete(lease, trajectory(lease))
    found = await ages()
    assert found["ready"] <= clock() - completed + 0.1
    assert found.keys() == {"queued", "ready"}


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
    await queue.journal(lease, turn(1), 0)
    journaled, waiting = await held()
    assert journaled - queued == waiting > 100
    await queue.complete(lease, trajectory(lease, tokens=5000))
    finished, waiting = await held()
    assert finished - queued == waiting
    assert 5000 * 21 < waiting < 1.2 * 5000 * 21  # 9 bytes a token, and here 12 of spans


@pytest.mark.parametrize("split", ["train", "eval/1"])
async def test_a_dead_letters_journal_counts_until_it_goes(make_queue, split: str) -> None:
    """It dies with its journal, and is as it was submitted after the requeue: twice, so that nothing adds up."""
    queue = await make_queue(replace(LIMITS, max_attempts=1, group_size=1))
    await queue.submit([task(0, split)], cursor=at(1) if split == "train" else None)
    submitted = (await queue.status()).bytes
    for _ in range(2):
        (lease,) = await queue.lease_episodes("worker", 1, 0)
        await queue.journal(lease, turn(1), 0)
        assert await queue.fail(lease, INFRA) is False
        dead = await queue.status()
        assert (dead.bytes > submitted, dead.unconsumed_bytes, len(await queue.dead_letters())) == (True, 0, 1)
        await queue.requeue(lease.episode_id)
        again = await queue.status()
        assert (again.bytes, again.unconsumed_bytes, again.groups["dead"]) == (submitted, 0, 0)
        assert await queue.dead_letter(lease.episode_id) is None


async def test_dead_letters_come_in_pages_oldest_first(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, max_attempts=1))
    await queue.submit([task(number, "eval/1") for number in range(3)])
    for lease in await queue.lease_episodes("worker", 3, 0):
        assert await queue.fail(lease, INFRA) is False

    async def page(limit: int, start: int = 0) -> list[str]:
        return [letter.episode_id for letter in await queue.dead_letters(limit, start)]

    first, second, third = await page(3)
    found = await queue.dead_letter(second)
    assert found == (await queue.dead_letters())[1]
    assert (found.outcome, found.attempts) == (INFRA, 1)
    assert [await page(2), await page(1, 1), await page(2, 2), await page(2, 3)] == [
        [first, second],
        [second],
        [third],
        [],
    ]


async def test_bytes_of_many_dead_letters_end_at_zero(make_queue) -> None:
    """The newest letters alone keep their journals; whether kept or not, each is subtracted once."""
    queue = await make_queue(replace(LIMITS, max_attempts=1))
    await queue.submit([task(number, "eval/1") for number in range(103)])
    for lease in await queue.lease_episodes("worker", 200, 0):
        await queue.journal(lease, turn(1), 0)
        assert await queue.fail(lease, INFRA) is False
    letters = await queue.dead_letters(200)
    assert [len(letter.journal) for letter in letters] == [0] * 3 + [1] * 100
    await queue.drop_split("eval/1")
    assert (await queue.status()).bytes == 0
