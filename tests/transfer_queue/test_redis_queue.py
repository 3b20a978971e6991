"""What only Redis can get wrong: lost replies, pauses, leftovers, unfit servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from queue_samples import INFRA, LIMITS, at, finish_all, task, tasks, trajectory, turn
from redis_parts import CONFIG, PASSWORD, Proxy, nothing_left_open

from penstock.transfer_queue import (
    Announcement,
    Batch,
    Lease,
    LeaseLost,
    QueueError,
    QueueUnavailable,
    RedisServer,
    RedisTransferQueue,
    ServerInfo,
    TransferQueue,
    TurnCall,
    WeightUpdate,
)
from penstock.transfer_queue.redis.payloads import UNACKNOWLEDGED_S

pytestmark = pytest.mark.redis


def check_protocol(queue: RedisTransferQueue) -> TransferQueue:
    """mypy holds the class to the protocol here."""
    return queue


@pytest.fixture
async def cut(
    queue: RedisTransferQueue, redis_server: RedisServer, connect_redis
) -> AsyncIterator[tuple[RedisTransferQueue, Proxy]]:
    """The same run through a proxy that loses replies on demand."""
    async with Proxy(redis_server.port) as proxy:
        yield await connect_redis(proxy.url), proxy


async def keys_of(queue: RedisTransferQueue) -> set[str]:
    found = set()
    for pattern in queue._keys.patterns():
        found |= {key.decode() for key in await queue._connection.command("KEYS", pattern.replace("{", "\\{"))}
    return {key.removeprefix(queue._keys.index) for key in found}


async def test_after_commit_only_counters_are_left(queue: RedisTransferQueue) -> None:
    await queue.submit(tasks(4), cursor=at(4))
    for _ in range(2):
        for lease in await queue.lease_episodes("worker", 4, 0):
            await queue.journal(lease, turn(1), 0)
            await queue.complete(lease, trajectory(lease))
    for step in (0, 1):
        await queue.lease_batch(step)
        await queue.publish_version(Announcement(step + 1, {}))
    await queue.commit(2)
    await queue.trim_ledger((await queue.ledger(0))[-1].number)
    left = await keys_of(queue)
    answers = {name for name in left if name.startswith("asked:")}  # for repeats of the call, they expire
    assert left - answers == {"run", "steps", "clock", "counters", "counts", "lengths"}
    for name in answers:
        assert 0 < await queue._connection.command("TTL", queue._keys.index + name) <= 2 * CONFIG.deadline_s
    assert await queue.drop_run() == 6 + len(answers)


async def test_two_lease_calls_of_one_worker_may_be_repeated(queue: RedisTransferQueue) -> None:
    """A gateway leases for several requests at once: whichever reply was lost, its repeat gives the same leases."""
    await queue.submit(tasks(4), cursor=at(4))

    async def lease(nonce: str) -> list[bytes]:
        rows = await queue._script("lease_episodes", "gateway", 2, 0, nonce, 60_000)
        return [row[0] for row in rows]

    first, second = await lease("a"), await lease("b")
    assert [await lease("a"), await lease("b")] == [first, second]
    assert (await queue.status()).workers == {"gateway": 4}


async def test_a_requeue_may_lose_its_reply(cut: tuple[RedisTransferQueue, Proxy]) -> None:
    queue, proxy = cut
    await queue.submit(tasks(1), cursor=at(1))
    first, second = await queue.lease_episodes("worker", 2, 0)
    await queue.complete(first, trajectory(first))
    with pytest.raises(QueueError, match=second.episode_id):  # no dead letter yet; the server now has the script
        await queue.requeue(second.episode_id)
    await queue.complete(second, trajectory(second, reward=None))
    proxy.let_through = 0
    await queue.requeue(second.episode_id)
    assert proxy.let_through is None, "no reply was cut"
    status = await queue.status()
    assert (status.groups["dead"], status.groups["queued"]) == (0, 1)
    with pytest.raises(QueueError, match=second.episode_id):  # another call, not a repeat
        await queue.requeue(second.episode_id)


async def test_every_call_may_lose_its_reply(cut: tuple[RedisTransferQueue, Proxy]) -> None:
    """Each call is executed by Redis, its reply is cut off, the client asks again: nothing is counted twice."""
    queue, proxy = cut

    async def lossy(call):
        proxy.let_through = 0
        answer = await call
        assert proxy.let_through is None, "no reply was cut"
        return answer

    await lossy(queue.submit(tasks(4), cursor=at(4)))
    leases = await lossy(queue.lease_episodes("worker", 8, 0))
    assert [lease.episode_id for lease in leases][:2] == ["train/0000#0", "train/0000#1"]
    assert (await queue.status()).workers == {"worker": 8}
    await lossy(queue.journal(leases[0], turn(1), 0))
    assert await lossy(queue.fail(leases[0], INFRA)) is True
    (again,) = await lossy(queue.lease_episodes("worker", 1, 0))
    assert (again.attempt, len(again.journal)) == (1, 1)
    await lossy(queue.release(again))
    for lease in [*leases[1:], *await queue.lease_episodes("worker", 1, 0)]:
        await lossy(queue.complete(lease, trajectory(lease)))
    assert (await lossy(queue.lease_batch(0))).step == 0
    assert await lossy(queue.publish_version(Announcement(1, {}))) is True
    await lossy(queue.commit(1))
    await lossy(queue.add_wait("trainer", "batch", 1.5))
    status = await lossy(queue.status())
    assert status.episodes["completed"] == 8
    assert status.episodes["retried"] == 1
    assert (status.episodes["trained"], status.episodes["committed"]) == (4, 4)
    assert status.waits_s == {"trainer:batch": 1.5}
    assert status.workers == {}


@pytest.mark.parametrize("let_through", [0, 3, 5, 9, 12, 20, 40])
async def test_complete_may_lose_any_reply(cut: tuple[RedisTransferQueue, Proxy], let_through: int) -> None:
    """Redis has executed everything, and the client has read some replies, or half of one."""
    queue, proxy = cut
    await queue.submit(tasks(3), cursor=at(3))
    leases = await queue.lease_episodes("worker", 6, 0)
    await queue.release(leases[2])
    (newer,) = await queue.lease_episodes("newer", 1, 0)
    finished = [(lease, trajectory(lease, reward=float(place))) for place, lease in enumerate(leases)]
    proxy.let_through = let_through
    calls = [queue.complete(*one) for one in finished]
    refusals = await asyncio.gather(*calls, return_exceptions=True)
    assert proxy.let_through is None, "no reply was cut"
    assert [type(refusal) for refusal in refusals if refusal is not None] == [LeaseLost]
    assert isinstance(refusals[2], LeaseLost)
    for one in finished[:2] + finished[3:]:
        await queue.complete(*one)
    assert (await queue.status()).episodes["completed"] == 5
    assert (await queue.status()).workers == {"newer": 1}
    taken = [lease.episode_id for lease in leases if lease is not leases[2]]
    assert [one.reward for one in await queue.read(taken)] == [0.0, 1.0, 3.0, 4.0, 5.0]
    payloads = [key for key in await keys_of(queue) if key.startswith("penstock:payload")]
    assert len(payloads) == 5, "a refused payload was left behind"
    await queue.complete(newer, trajectory(newer))


async def test_complete_that_was_cut_off_is_made_again_by_another(queue: RedisTransferQueue) -> None:
    """A worker dies with some of its episodes acknowledged: who has the same leases ends the others."""
    await queue.submit(tasks(2), cursor=at(2))
    leases = await queue.lease_episodes("worker", 4, 0)
    finished = [(lease, trajectory(lease, reward=0.25, tokens=200_000)) for lease in leases]
    for pause_s in (0.0, 0.001, 0.004):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await asyncio.gather(*(queue.complete(*one) for one in finished))
    again = [(lease, trajectory(lease, reward=0.75, tokens=200_000)) for lease in leases]
    for one in again:
        await queue.complete(*one)
    assert (await queue.status()).episodes["completed"] == 4
    found = await queue.read([lease.episode_id for lease in leases])
    assert {one.reward for one in found} <= {0.25, 0.75}


async def payloads_of(queue: RedisTransferQueue) -> set[str]:
    """Keys of payloads, without what names the run."""
    start = f"penstock:payload:{queue._run}:"
    return {key.removeprefix(start) for key in await keys_of(queue) if key.startswith(start)}


async def names_of(queue: RedisTransferQueue, leases: Sequence[Lease]) -> set[str]:
    """Payloads that the index names."""
    return {stored.name for stored in await queue._locate([lease.episode_id for lease in leases])}


async def test_payloads_that_nothing_names_are_deleted_at_once(queue: RedisTransferQueue) -> None:
    """Of a group that died, by the next publication; of lost episodes and of a split, with them."""
    await queue.submit(tasks(3), cursor=at(3))
    leases = await queue.lease_episodes("worker", 6, 0)
    for lease in leases:
        await queue.complete(lease, trajectory(lease, reward=None if lease is leases[0] else 1.0))
    assert isinstance(await queue.lease_batch(0), Batch)
    assert len(await payloads_of(queue)) == 6
    await queue.publish_version(Announcement(1, {}))
    assert await payloads_of(queue) == await names_of(queue, leases[2:])
    assert await queue.drop_lost(0, [leases[2].episode_id]) == 2
    assert await payloads_of(queue) == await names_of(queue, leases[4:])
    await queue.submit([task(0, "eval/1")])
    (other,) = await queue.lease_episodes("worker", 1, 1)
    await queue.complete(other, trajectory(other))
    assert len(await payloads_of(queue)) == 3
    await queue.drop_split("eval/1")
    assert len(await payloads_of(queue)) == 2
    assert not [key for key in await keys_of(queue) if "eval" in key]


async def test_spilled_payloads_leave_redis_at_once(queue: RedisTransferQueue, trainer: RedisTransferQueue) -> None:
    await queue.submit(tasks(2), cursor=at(2))
    episodes = await finish_all(queue)
    await trainer.lease_batch(0)
    await trainer.publish_version(Announcement(1, {}))
    assert await trainer.spill(0, episodes[1:]) == 3
    assert [name.partition("@")[0] for name in await payloads_of(queue)] == episodes[:1]


async def test_a_writer_that_died_leaves_no_payload_behind(queue: RedisTransferQueue) -> None:
    """What it stored expires; what was acknowledged does not."""
    await queue.submit(tasks(1), cursor=at(1))
    lease, other = await queue.lease_episodes("worker", 2, 0)
    dead = queue._completions.pack(lease, trajectory(lease, tokens=110_000))
    await queue._connection.many(dead.writes)
    await queue.complete(other, trajectory(other, tokens=110_000))
    (stored,) = await queue._locate([other.episode_id])
    keys = {one: queue._payloads.keys(one) for one in (dead.stored, stored)}
    left_s = {one: [await queue._connection.command("TTL", key) for key in keys[one]] for one in keys}
    assert all(0 < seconds <= UNACKNOWLEDGED_S for seconds in left_s[dead.stored])
    assert left_s[stored] == [-1] * len(keys[stored])
    assert len(keys[stored]) > 1


async def test_what_is_over_leaves_no_key(queue: RedisTransferQueue) -> None:
    """A requeued letter, a silent and a deregistered server, a turn that was not renewed."""
    await queue.submit([task(0, "eval/1")])
    for attempt in range(3):
        (lease,) = await queue.lease_episodes("worker", 1, 0)
        await queue.journal(lease, turn(attempt), attempt)
        await queue.fail(lease, INFRA)
    names = await keys_of(queue)
    assert {"letters", "letter:eval/1/0000#0", "letter_journal:eval/1/0000#0"} <= names
    await queue.requeue(lease.episode_id)
    queue._registry_ttl_ms = 50
    await queue.heartbeat(ServerInfo("silent", "http://a", 0))
    await queue.take_turn(TurnCall("engine", "silent", 1, holds=True, ttl_s=0.05))
    await asyncio.sleep(0.1)
    queue._registry_ttl_ms = 60_000
    await queue.heartbeat(ServerInfo("alive", "http://a", 0))
    await queue.take_turn(TurnCall("engine", "alive", 1, holds=True, ttl_s=60.0))
    kept = [("HKEYS", "servers"), ("ZRANGE", "servers_until", 0, -1), ("HKEYS", "turns")]
    commands = [(command, queue._keys.index + key, *rest) for command, key, *rest in kept]
    assert await queue._connection.many(commands) == [[b"alive"]] * 3
    await queue.deregister("alive")
    assert not [key for key in await keys_of(queue) if key.startswith(("letter", "servers"))]


async def test_a_claim_of_training_may_be_repeated(queue: RedisTransferQueue) -> None:
    epochs = [await queue._script("claim_training", "trainer", nonce) for nonce in ("a", "a", "b")]
    assert epochs[0] == epochs[1] < epochs[2]


@pytest.mark.parametrize("functions", [True, False])
async def test_a_full_redis_lets_everything_end(
    queue: RedisTransferQueue, trainer: RedisTransferQueue, functions: bool
) -> None:
    """What makes room, or says who is alive, goes through. A Redis 6.2 gets scripts, which it lets write where their
    first write needs no room."""
    trainer._connection._functions = queue._connection._functions = functions
    await trainer.claim_training("trainer")
    await queue.submit([*tasks(4), task(0, "eval/1")])
    _, *leases = await queue.lease_episodes("worker", 7, 0)
    for lease in leases[:4]:
        await queue.complete(lease, trajectory(lease))
    await queue._connection.command("CONFIG", "SET", "maxmemory", 1)
    try:
        assert await queue.adopt(leases[4].episode_id, leases[4].fence) == leases[4]
        assert await queue.renew(leases[4:]) == []
        await queue.release(leases[4])
        assert await queue.fail(leases[5], INFRA) is True
        assert len(await queue.lease_episodes("worker", 2, 0)) == 2
        await queue.heartbeat(ServerInfo("one", "http://a", 0))
        await queue.deregister("one")
        await queue.report_update(WeightUpdate("one", 1, 0.1, 0.1, 0.1, 0))
        await queue.add_wait("agent", "lease", 0.5)
        assert await queue.claim_head("head", 30.0) is None
        assert (await queue.take_turn(TurnCall("engine", "one", 1, holds=True, ttl_s=30.0))).fence
        await queue.drop_split("eval/1")
        batch = await trainer.lease_batch(0)
        assert isinstance(batch, Batch)
        assert await trainer.publish_version(Announcement(1, {}))
        assert await trainer.renew_manifest(Announcement(1, {"path": "v1"}))
        assert await trainer.spill(0, batch.groups[0]) == 2
        await trainer.commit(1)
    finally:
        await queue._connection.command("CONFIG", "SET", "maxmemory", 0)
    assert (await queue.status()).committed_step == 1


@pytest.mark.parametrize("functions", [True, False])
async def test_a_full_redis_takes_no_tasks(queue: RedisTransferQueue, functions: bool) -> None:
    """Nor does a Redis 6.2, which lets a script write on once it has written."""
    queue._connection._functions = functions
    await queue.submit(tasks(1))
    running, expired = await queue.lease_episodes("worker", 2, 0)
    await queue._connection.command("ZADD", queue._keys.index + "leases", 0, expired.episode_id)
    assert await queue.lease_episodes("worker", 0, 0) == [], "takes the expired lease back"
    await queue._connection.command("CONFIG", "SET", "maxmemory", 1)
    try:
        queue._connection._deadline_s = 0.2
        with pytest.raises(QueueUnavailable, match=r"submit: no answer .*(OOM|memory)"):
            await queue.submit(tasks(1, start=1))
        with pytest.raises(QueueUnavailable, match=r"journal: no answer .*(OOM|memory)"):
            await queue.journal(running, turn(0), 0)
        with pytest.raises(QueueUnavailable, match=r"journal: no answer .*(OOM|memory)"):
            await queue.journal(expired, turn(0), 0)
    finally:
        await queue._connection.command("CONFIG", "SET", "maxmemory", 0)
    queue._connection._deadline_s = CONFIG.deadline_s
    assert await queue.submit(tasks(1, start=1)) == 1
    await queue.journal(expired, turn(0), 0)


async def test_close_closes_the_connections(redis_server: RedisServer) -> None:
    with nothing_left_open():
        closed = await RedisTransferQueue.connect(redis_server.url, "closed", CONFIG, PASSWORD)
        await closed.close()
        del closed


async def test_a_cancelled_call_ends(queue: RedisTransferQueue) -> None:
    """A worker that drains cancels its calls; one that went on would never end."""

    async def poll() -> None:
        while True:
            await queue.lease_episodes("worker", 1, 0)

    for _ in range(40):
        polling = [asyncio.create_task(poll()) for _ in range(3)]
        await asyncio.sleep(random.uniform(0, 0.005))
        for one in polling:
            one.cancel()
        _, alive = await asyncio.wait(polling, timeout=60)
        assert not alive
    assert await queue.submit(tasks(1)) == 1


async def test_two_runs_do_not_see_each_other(queue: RedisTransferQueue, connect_redis) -> None:
    other = await connect_redis(run=queue._run + "-b")
    await other.create_run(replace(LIMITS, group_size=5), "y")
    await other.submit(tasks(1), cursor=at(1))
    await queue.submit(tasks(2), cursor=at(2))
    await other.drop_run()
    assert (await queue.status()).groups["queued"] == 2


async def test_compressed_trajectories_are_smaller_and_equal(queue: RedisTransferQueue, connect_redis) -> None:
    packing = await connect_redis(compression="zstd")
    await queue.submit(tasks(1), cursor=at(1))
    plain, small = await queue.lease_episodes("worker", 2, 0)
    await queue.complete(plain, trajectory(plain, tokens=5000))
    before = (await queue.status()).unconsumed_bytes
    await packing.complete(small, trajectory(small, tokens=5000))
    assert (await queue.status()).unconsumed_bytes - before < before / 2
    one, two = await queue.read([plain.episode_id, small.episode_id])  # a reader needs no setting
    assert repr(two.segments) == repr(one.segments)
    (values,) = await queue.get([small.episode_id], ["response_ids"])
    assert values.segments[0]["response_ids"].tolist() == list(range(5001))


@pytest.mark.parametrize(("stored", "found"), [(None, "1"), ("4", "4")])
async def test_a_run_of_another_layout_is_refused(queue: RedisTransferQueue, stored: str | None, found: str) -> None:
    """Keys that an older or newer version wrote; runs of layout 1 had no such field."""
    run = queue._keys.run
    write = ("HDEL", run, "layout") if stored is None else ("HSET", run, "layout", stored)
    await queue._connection.command(*write)
    for call in (queue.config(), queue.create_run(LIMITS, "x"), queue.submit(tasks(1)), queue.status()):
        with pytest.raises(QueueError, match=rf"layout {found}, .* layout 3: .*penstock queue drop"):
            await call
    assert await queue.drop_run() > 0
    await queue.create_run(LIMITS, "x")
    assert await queue.config() == "x"


async def test_a_run_from_before_there_were_branches_has_none(queue: RedisTransferQueue) -> None:
    await queue._connection.command("HDEL", queue._keys.run, "branches")
    await queue.submit(tasks(1), cursor=at(1))
    assert len(await queue.lease_episodes("worker", 9, 0)) == LIMITS.group_size
    with pytest.raises(QueueError, match=r"exists with branches = 0, not 1; set agent\.forks to null"):
        await queue.create_run(replace(LIMITS, branches=1), "x")
    await queue.create_run(LIMITS, "x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lease_ttl_s": 7.5}, "exists with lease_ttl_s = 30, not 7.5; set lease_ttl_s to 30 to continue"),
        ({"min_group": 1}, "exists with min_group = 2, not 1; set min_group to 2 to continue"),
    ],
)
async def test_limits_that_differ_are_named_as_they_are_set(
    queue: RedisTransferQueue, changed: dict[str, float], message: str
) -> None:
    with pytest.raises(QueueError, match=message):
        await queue.create_run(replace(LIMITS, **changed), "x")  # type: ignore[arg-type]
