"""Round trips that calls share: their number and size, and each caller's end beside a cut, silent or killed Redis."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from queue_samples import LIMITS, at, task, tasks, trajectory
from redis_parts import CONFIG, PASSWORD, Proxy

from penstock.transfer_queue import Lease, LeaseLost, QueueError, QueueUnavailable, RedisServer, RedisTransferQueue

pytestmark = pytest.mark.redis
ROOMY = replace(LIMITS, group_size=8, groups_per_step=8)


@pytest.fixture
async def queue(redis_server: RedisServer) -> AsyncIterator[RedisTransferQueue]:
    made = await RedisTransferQueue.connect(redis_server.url, f"c-{secrets.token_hex(4)}", CONFIG, PASSWORD)
    await made.create_run(ROOMY, "x")
    yield made
    await made.drop_run()
    await made.close()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path, PASSWORD) as server:
        yield server


async def leased(queue: RedisTransferQueue, groups: int) -> list[Lease]:
    await queue.submit(tasks(groups), cursor=at(groups))
    return await queue.lease_episodes("worker", 8 * groups, 0)


def start(queue: RedisTransferQueue, leases: Sequence[Lease], tokens: int = 2) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(queue.complete(lease, trajectory(lease, tokens=tokens))) for lease in leases]


async def ended(calls: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
    async with asyncio.timeout(120):
        return await asyncio.gather(*calls, return_exceptions=True)


def watch(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(jobs, bytes of payloads) of each attempt, as it begins."""
    seen: list[tuple[int, int]] = []
    try_jobs = queue._connection.try_jobs

    async def counted(jobs: Sequence[Any]) -> None:
        seen.append((len(jobs), sum(job.writes[0].args[2].size for job in jobs)))
        await try_jobs(jobs)

    monkeypatch.setattr(queue._connection, "try_jobs", counted)
    return seen


async def test_what_waits_goes_together(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = await leased(queue, 4)
    seen = watch(queue, monkeypatch)
    assert await ended(start(queue, leases)) == [None] * 32
    assert [jobs for jobs, _ in seen] == [1, 1, 30]


async def test_a_round_trip_has_64_calls(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = await leased(queue, 9)
    seen = watch(queue, monkeypatch)
    assert await ended(start(queue, leases)) == [None] * 72
    assert [jobs for jobs, _ in seen] == [1, 1, 64, 6]


async def test_two_round_trips_of_many_are_under_way(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 episodes each."""
    leases = await leased(queue, 16)
    assert len(leases) == 128
    await queue.submit([task(number, "eval/1") for number in range(66)])
    leases += await queue.lease_episodes("worker", 66, 0)
    try_jobs, under_way, seen = queue._connection.try_jobs, 0, list[tuple[int, int]]()

    async def counted(jobs: Sequence[Any]) -> None:
        nonlocal under_way
        under_way += 1
        seen.append((under_way, len(jobs)))
        await try_jobs(jobs)
        under_way -= 1

    monkeypatch.setattr(queue._connection, "try_jobs", counted)
    assert await queue.complete_many([(lease, trajectory(lease)) for lease in leases]) == [None] * 194
    assert (max(seen)[0], sorted(jobs for _, jobs in seen)) == (2, [2, 64, 64, 64])


async def test_a_refused_call_is_not_made_again(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = await leased(queue, 1)
    for lease in leases[:2]:
        await queue.release(lease)
    monkeypatch.setattr(queue._connection, "run_jobs", None)
    with pytest.raises(LeaseLost):
        await queue.complete(leases[0], trajectory(leases[0]))
    refusals = await queue.complete_many([(lease, trajectory(lease)) for lease in leases[1:]])
    assert [type(refusal) for refusal in refusals] == [LeaseLost, *[type(None)] * 6]


async def test_lone_calls_go_at_once(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = await leased(queue, 1)
    seen = watch(queue, monkeypatch)
    for lease in leases:
        call = asyncio.create_task(queue.complete(lease, trajectory(lease)))
        await asyncio.sleep(0)
        assert len(seen) == lease.member + 1, "it is under way as soon as it is called"
        await call
    assert seen == [(1, size) for _, size in seen]


async def test_a_round_trip_has_limits(queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = await leased(queue, 4)
    seen = watch(queue, monkeypatch)
    assert await ended(start(queue, leases, tokens=5_000)) == [None] * 32
    assert all(jobs == 1 or size <= 512 << 10 for jobs, size in seen)
    assert sum(jobs for jobs, _ in seen) == 32
    assert 8 < len(seen) < 20, seen


@pytest.mark.parametrize("let_through", [0, 3, 9, 40])
async def test_any_reply_may_be_lost(queue: RedisTransferQueue, redis_server: RedisServer, let_through: int) -> None:
    """Redis has executed a shared round trip, and the client has read some of the replies, or half of one."""
    leases = await leased(queue, 2)
    await queue.release(leases[9])
    async with Proxy(redis_server.port) as proxy:
        through = await RedisTransferQueue.connect(proxy.url, queue._run, CONFIG, PASSWORD)
        proxy.let_through = let_through
        found = await ended(start(through, leases))
        assert proxy.let_through is None, "no reply was cut"
        await through.close()
    assert [type(outcome) for outcome in found if outcome is not None] == [LeaseLost]
    assert isinstance(found[9], LeaseLost)
    status = await queue.status()
    assert (status.episodes["completed"], status.workers) == (15, {})


@pytest.mark.parametrize("restarted", [True, False])
async def test_redis_is_killed_in_the_middle(own_server: RedisServer, restarted: bool) -> None:
    """Some are acknowledged, some are under way, some wait: each is ended once, the fenced one refused; without Redis
    each says so by its own deadline."""
    config = CONFIG if restarted else CONFIG.model_copy(update={"deadline_s": 3.0})
    queue = await RedisTransferQueue.connect(own_server.url, "killed", config, PASSWORD)
    await queue.create_run(ROOMY, "x")
    leases = await leased(queue, 6)
    await queue.release(leases[40])
    calls = start(queue, leases, tokens=5_000)
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await own_server.kill()
    assert not all(call.done() for call in calls)
    if restarted:
        await own_server.restart()
        found = await ended(calls)
        assert [place for place, outcome in enumerate(found) if outcome is not None] == [40]
        assert isinstance(found[40], LeaseLost)
    else:
        found = await ended(calls)
        assert {type(outcome) for outcome in found} == {type(None), QueueUnavailable}
        await own_server.restart()
        again = [lease for lease, outcome in zip(leases, found, strict=True) if outcome is not None]
        assert [type(outcome) for outcome in await ended(start(queue, again, 5_000)) if outcome] == [LeaseLost]
    status = await queue.status()
    assert (status.episodes["completed"], status.workers) == (47, {})
    taken = [lease.episode_id for lease in leases if lease is not leases[40]]
    assert [one.episode_id for one in await queue.read(taken)] == taken
    await queue.close()


async def test_a_silent_redis_holds_no_caller_past_its_deadline(own_server: RedisServer) -> None:
    config = CONFIG.model_copy(update={"deadline_s": 2.0})
    queue = await RedisTransferQueue.connect(own_server.url, "silent", config, PASSWORD)
    await queue.create_run(ROOMY, "x")
    leases = await leased(queue, 2)
    own_server._process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            assert {type(outcome) for outcome in await ended(start(queue, leases))} == {QueueUnavailable}
    finally:
        own_server._process.send_signal(signal.SIGCONT)
    patient = await RedisTransferQueue.connect(own_server.url, "silent", CONFIG, PASSWORD)
    assert await ended(start(patient, leases)) == [None] * 16
    assert (await patient.status()).episodes["completed"] == 16
    await queue.close()
    await patient.close()


async def test_an_error_of_all_is_repeated_by_each(
    queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leases = await leased(queue, 2)
    try_jobs = queue._connection.try_jobs

    async def only_alone(jobs: Sequence[Any]) -> None:
        if len(jobs) > 1:
            raise ValueError("one of them cannot be sent")
        await try_jobs(jobs)

    monkeypatch.setattr(queue._connection, "try_jobs", only_alone)
    assert await ended(start(queue, leases)) == [None] * 16
    assert "one of them cannot be sent" in caplog.text


@pytest.mark.parametrize("many", [False, True], ids=["complete", "complete_many"])
async def test_a_script_that_breaks_off_fails_only_whose_keys_are_broken(queue: RedisTransferQueue, many: bool) -> None:
    """The script ends the episodes of a round trip one by one; what it stops at must not take the others along."""
    leases = await leased(queue, 3)
    group = f"{queue._keys.index}group:{leases[8].task.task_id}"
    await queue._connection.command("RENAME", group, f"{queue._keys.index}aside")
    await queue._connection.command("SET", group, "no hash")
    if many:
        with pytest.raises(QueueError, match="WRONGTYPE"):
            await queue.complete_many([(lease, trajectory(lease)) for lease in leases])
    else:
        found = await ended(start(queue, leases))
        broken = [place for place, outcome in enumerate(found) if outcome is not None]
        assert broken == list(range(8, 16))
        assert all("WRONGTYPE" in str(found[place]) for place in broken)
    await queue._connection.command("RENAME", f"{queue._keys.index}aside", group)
    status = await queue.status()
    assert (status.episodes["completed"], status.workers) == (16, {"worker": 8})
    assert await ended(start(queue, leases)) == [None] * 24


@pytest.mark.parametrize("begun", [True, False], ids=["under-way", "not-begun"])
async def test_closing_leaves_no_caller_waiting(
    redis_server: RedisServer, queue: RedisTransferQueue, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """A shared attempt that is under way for ever, or whose task has not begun."""
    closing = await RedisTransferQueue.connect(redis_server.url, queue._run, CONFIG, PASSWORD)
    leases = await leased(queue, 2)
    try_jobs, shared, release = closing._connection.try_jobs, asyncio.Event(), asyncio.Event()

    async def slow(jobs: Sequence[Any]) -> None:
        if len(jobs) > 1:
            shared.set()
            await asyncio.Event().wait()
        await release.wait()
        await try_jobs(jobs)

    monkeypatch.setattr(closing._connection, "try_jobs", slow)
    calls = start(closing, leases)
    await asyncio.sleep(0)
    release.set()
    if begun:
        await shared.wait()
    else:
        while not closing._completions._coalescing._tasks:
            await asyncio.sleep(0)
    await closing.close()
    with suppress(asyncio.CancelledError):
        await ended(calls)
    assert [outcome for outcome in await ended(start(queue, leases)) if outcome is not None] == []
    assert (await queue.status()).episodes["completed"] == 16
