"""What only Redis can get wrong: lost replies, pauses, leftovers, unfit servers."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_samples import INFRA, LIMITS, at, tasks, trajectory, turn
from redis_parts import Proxy

from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Announcement, LeaseLost, Ledger, LedgerError, LedgerUnavailable
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.redis_server import RedisServer

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"
CONFIG = TransferQueueConfig(deadline_s=20.0)


def check_protocol(ledger: RedisLedger) -> Ledger:
    """mypy holds the class to the protocol here."""
    return ledger


@pytest.fixture
async def ledger(redis_server: RedisServer) -> AsyncIterator[RedisLedger]:
    made = await RedisLedger.connect(redis_server.url, f"r-{secrets.token_hex(4)}", CONFIG, PASSWORD)
    await made.create_run(LIMITS, "x")
    yield made
    await made.drop_run()
    await made.close()


@pytest.fixture
async def cut(ledger: RedisLedger, redis_server: RedisServer) -> AsyncIterator[tuple[RedisLedger, Proxy]]:
    """The same run through a proxy that loses replies on demand."""
    async with Proxy(redis_server.port) as proxy:
        through = await RedisLedger.connect(proxy.url, ledger._run, CONFIG, PASSWORD)
        yield through, proxy
        await through.close()


async def keys_of(ledger: RedisLedger) -> set[str]:
    found = set()
    for pattern in ledger._keys.patterns():
        found |= {key.decode() for key in await ledger._connection.command("KEYS", pattern.replace("{", "\\{"))}
    return {key.removeprefix(ledger._keys.index) for key in found}


async def test_after_commit_only_counters_are_left(ledger: RedisLedger) -> None:
    await ledger.submit(tasks(4), cursor=at(4))
    for _ in range(2):
        for lease in await ledger.lease_episodes("worker", 4, 0):
            await ledger.journal(lease, turn(1))
            await ledger.complete(lease, trajectory(lease))
    for step in (0, 1):
        await ledger.lease_batch(step)
        await ledger.publish_version(Announcement(step + 1, {}))
    await ledger.commit(2)
    assert await keys_of(ledger) == {"run", "steps", "counters", "counts", "lengths", "asked"}
    assert await ledger.drop_run() == 6


async def test_every_call_may_lose_its_reply(cut: tuple[RedisLedger, Proxy]) -> None:
    """Each call is executed by Redis, its reply is cut off, the client asks again: nothing is counted twice."""
    ledger, proxy = cut

    async def lossy(call):
        proxy.let_through = 0
        answer = await call
        assert proxy.let_through is None, "no reply was cut"
        return answer

    await lossy(ledger.submit(tasks(4), cursor=at(4)))
    leases = await lossy(ledger.lease_episodes("worker", 8, 0))
    assert [lease.episode_id for lease in leases][:2] == ["train/0000#0", "train/0000#1"]
    assert (await ledger.status()).workers == {"worker": 8}
    await lossy(ledger.journal(leases[0], turn(1)))
    assert await lossy(ledger.fail(leases[0], INFRA)) is True
    (again,) = await ledger.lease_episodes("worker", 1, 0)
    assert (again.attempt, len(again.journal)) == (1, 1)
    await lossy(ledger.release(again))
    for lease in [*leases[1:], *await ledger.lease_episodes("worker", 1, 0)]:
        await lossy(ledger.complete(lease, trajectory(lease)))
    assert (await lossy(ledger.lease_batch(0))).step == 0
    assert await lossy(ledger.publish_version(Announcement(1, {}))) is True
    await lossy(ledger.commit(1))
    await lossy(ledger.add_wait("trainer", "batch", 1.5))
    status = await lossy(ledger.status())
    assert status.episodes["completed"] == 8
    assert status.episodes["retried"] == 1
    assert (status.episodes["trained"], status.episodes["committed"]) == (4, 4)
    assert status.waits_s == {"trainer:batch": 1.5}
    assert status.workers == {}


async def test_a_late_writer_leaves_no_payload_behind(ledger: RedisLedger) -> None:
    await ledger.submit(tasks(1), cursor=at(1))
    (old,) = await ledger.lease_episodes("old", 1, 0)
    await ledger.release(old)
    (new,) = await ledger.lease_episodes("new", 1, 0)
    await ledger.complete(new, trajectory(new, reward=0.5))
    with pytest.raises(LeaseLost):
        await ledger.complete(old, trajectory(old, reward=0.9))
    payloads = [key for key in await keys_of(ledger) if key.startswith("penstock:payload")]
    assert payloads == [f"penstock:payload:{ledger._run}:train/0000#0@{new.fence}"]
    assert (await ledger.read([new.episode_id]))[0].reward == 0.5


async def test_calls_wait_for_a_paused_redis(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server:
        ledger = await RedisLedger.connect(server.url, "paused", CONFIG, PASSWORD)
        await ledger.create_run(LIMITS, "x")
        server._process.send_signal(signal.SIGSTOP)
        asking = asyncio.create_task(ledger.submit(tasks(2), cursor=at(2)))
        await asyncio.sleep(0.3)
        assert not asking.done()
        server._process.send_signal(signal.SIGCONT)
        assert await asking == 2
        await ledger.close()


async def test_a_redis_that_is_gone_is_named_after_the_deadline(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, PASSWORD) as server:
        ledger = await RedisLedger.connect(server.url, "gone", replace_deadline(0.5), PASSWORD)
        await ledger.create_run(LIMITS, "x")
        await server.kill()
        with pytest.raises(LedgerUnavailable, match=rf"submit: no answer from {server.url} for \d+\.\d s"):
            await ledger.submit(tasks(1))
        await server.restart()
        assert await ledger.submit(tasks(1)) == 1
        await ledger.close()


async def test_an_unfit_redis_is_refused(redis_server: RedisServer, ledger: RedisLedger) -> None:
    with pytest.raises(LedgerError, match="refused the login"):
        await RedisLedger.connect(redis_server.url, "x", CONFIG, "wrong-password")
    with pytest.raises(LedgerError, match="ledger URL 'http://nowhere'"):
        await RedisLedger.connect("http://user:secret@nowhere", "x", CONFIG)
    with pytest.raises(LedgerError, match="run name"):
        await RedisLedger.connect(redis_server.url, "x*", CONFIG, PASSWORD)
    await ledger._connection.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(LedgerError, match="maxmemory-policy allkeys-lru"):
            await RedisLedger.connect(redis_server.url, "x", CONFIG, PASSWORD)
    finally:
        await ledger._connection.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_cancelled_call_ends(ledger: RedisLedger) -> None:
    """A worker that drains cancels its calls; one that went on would never end."""

    async def poll() -> None:
        while True:
            await ledger.lease_episodes("worker", 1, 0)

    for _ in range(40):
        polling = [asyncio.create_task(poll()) for _ in range(3)]
        await asyncio.sleep(random.uniform(0, 0.005))
        for task in polling:
            task.cancel()
        _, alive = await asyncio.wait(polling, timeout=60)
        assert not alive
    assert await ledger.submit(tasks(1)) == 1


async def test_scripts_are_sent_again_to_a_redis_that_forgot_them(ledger: RedisLedger) -> None:
    await ledger._connection.command("SCRIPT", "FLUSH")
    assert await ledger.submit(tasks(1)) == 1


async def test_two_runs_do_not_see_each_other(ledger: RedisLedger, redis_server: RedisServer) -> None:
    other = await RedisLedger.connect(redis_server.url, ledger._run + "-b", CONFIG, PASSWORD)
    await other.create_run(replace(LIMITS, group_size=5), "y")
    await other.submit(tasks(1), cursor=at(1))
    await ledger.submit(tasks(2), cursor=at(2))
    await other.drop_run()
    assert (await ledger.status()).groups["queued"] == 2
    await other.close()


def replace_deadline(deadline_s: float) -> TransferQueueConfig:
    return CONFIG.model_copy(update={"deadline_s": deadline_s})


async def test_compressed_trajectories_take_less_and_come_back_the_same(
    ledger: RedisLedger, redis_server: RedisServer
) -> None:
    packing = await RedisLedger.connect(
        redis_server.url, ledger._run, CONFIG.model_copy(update={"compression": "zstd"}), PASSWORD
    )
    await ledger.submit(tasks(1), cursor=at(1))
    plain, small = await ledger.lease_episodes("worker", 2, 0)
    await ledger.complete(plain, trajectory(plain, tokens=5000))
    before = (await ledger.status()).unconsumed_bytes
    await packing.complete(small, trajectory(small, tokens=5000))
    assert (await ledger.status()).unconsumed_bytes - before < before / 2
    one, two = await ledger.read([plain.episode_id, small.episode_id])  # a reader needs no setting
    assert repr(two.segments) == repr(one.segments)
    (values,) = await ledger.get([small.episode_id], ["response_ids"], 4990, 4993)
    assert values.segments[0]["response_ids"].tolist() == [4990, 4991, 4992]
    await packing.close()
