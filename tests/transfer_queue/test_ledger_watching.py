"""What `Ledger` promises of servers, other lanes and numbers. One suite for memory, Redis and a Redis Cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ledger_samples import INFRA, LIMITS, at, finish_all, task, tasks, train, trajectory, turn

from penstock.transfer_queue.ledger import (
    KEPT_UPDATES,
    LedgerError,
    ServerInfo,
    WeightUpdate,
)


async def test_servers_live_as_long_as_they_beat(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    one, two = ServerInfo("one", "http://a", 1, 3, True, 900), ServerInfo("two", "http://b", 0, 0, False)
    await ledger.heartbeat(two)
    await ledger.heartbeat(one)
    assert await ledger.servers() == [one, two]
    await ledger.deregister("two")
    assert await ledger.servers() == [one]
    async with asyncio.timeout(60):
        while await ledger.servers():
            await asyncio.sleep(0.1)


async def test_updates_are_kept_in_order(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    reported = [WeightUpdate("one", version, 0.02, 0.1, 0.01, version) for version in (1, 2, 2)]
    for update in reported:
        await ledger.report_update(update)
    assert await ledger.updates() == reported


async def test_only_the_newest_updates_are_kept(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    for version in range(KEPT_UPDATES + 3):
        await ledger.report_update(WeightUpdate("one", version, 0.02, 0.1, 0.01, 0))
    assert [update.version for update in await ledger.updates()] == list(range(3, KEPT_UPDATES + 3))


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


async def test_bytes_follow_tasks_journals_and_payloads(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)

    async def held() -> tuple[int, int]:
        status = await ledger.status()
        return status.bytes, status.unconsumed_bytes

    assert await held() == (0, 0)
    await ledger.submit(tasks(1), cursor=at(1))
    (lease,) = await ledger.lease_episodes("worker", 1, 0)
    queued, waiting = await held()
    assert (queued > 500, waiting) == (True, 0)
    await ledger.journal(lease, turn(1))
    journaled, waiting = await held()
    assert journaled - queued == waiting > 100
    await ledger.complete(lease, trajectory(lease, tokens=5000))
    finished, waiting = await held()
    assert finished - queued == waiting
    assert 5000 * 21 < waiting < 1.2 * 5000 * 21  # 9 bytes a token, and here 12 of spans


async def test_held_names_finished_episodes_until_their_step_is_committed(make_ledger) -> None:
    ledger = await make_ledger(LIMITS)
    await ledger.submit(tasks(LIMITS.groups_per_step), cursor=at(LIMITS.groups_per_step))
    assert await ledger.held() == set()
    finished = await finish_all(ledger)
    assert await ledger.held() == set(finished)
    await train(ledger, 0)
    assert await ledger.held() == set(finished)
    await ledger.commit(1)
    assert await ledger.held() == set()
