"""What a run holds in Redis: counted truly, and not growing with the checkpoint interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from queue_samples import LIMITS, at, finish_all, task, tasks, train, trajectory
from queue_samples import spill as spill_step

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    Announcement,
    Archive,
    Batch,
    JournalEntry,
    JournalKind,
    LengthDecile,
    Limits,
    QueueGauges,
    RedisServer,
    RedisTransferQueue,
    ServerInfo,
    Status,
    Task,
    TransferQueueConfig,
    exposition,
)
from penstock.transfer_queue.codec.trajectories import encode_task
from penstock.transfer_queue.metrics import MEMBER_COST, journal_cost, payload_cost, task_cost

SERVERS = [ServerInfo("s1", "http://b", 1), ServerInfo("s0", "http://a", 0)]


async def test_gauges_say_what_the_status_says() -> None:
    now = 100.0
    queue = MemoryTransferQueue(clock=lambda: now)
    await queue.create_run(replace(LIMITS, max_staleness=2), "x")
    await queue.submit(tasks(9), cursor=at(9))
    await finish_all(queue)
    await train(queue, 0)
    await queue.add_wait("trainer", "batch", 1.5)
    now = 107.0
    status = await queue.status()
    families = {f.name: f for f in text_string_to_metric_families(exposition("r1", status, SERVERS).decode())}
    values = {
        (name, *sorted(set(s.labels.values()) - {"r1"})): s.value for name, f in families.items() for s in f.samples
    }
    assert values["penstock_queue_version",] == 1
    assert values["penstock_queue_groups", "ready"] == 4
    assert values["penstock_queue_groups", "queued"] == 3
    assert values["penstock_queue_episodes", "completed"] == 12
    assert values["penstock_queue_age_seconds", "queued"] == 7
    assert values["penstock_queue_waited_seconds", "trainer:batch"] == 1.5
    assert values["penstock_queue_bytes",] == status.bytes > 0
    assert values["penstock_queue_over_age_share", "10"] == 0
    assert values["penstock_queue_server_version_lag", "s0"] == 1
    assert values["penstock_queue_server_version_lag", "s1"] == 0
    assert all(s.labels["run"] == "r1" for family in families.values() for s in family.samples)


def test_no_status_no_gauges() -> None:
    assert list(QueueGauges("r1", lambda: None).collect()) == []


def test_gauges_share_over_age_by_decile_and_lag() -> None:
    deciles = [LengthDecile(10, 4, 1), LengthDecile(20, 0, 0), *[LengthDecile(30, 2, 2)] * 8]
    status = Status(1, 1, 1, {}, {}, 0, {}, {}, over_age=deciles)
    text = exposition("r1", status, [*SERVERS, ServerInfo("ahead", "http://c", 3)]).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    shares = {s.labels["decile"]: s.value for s in samples if s.name == "penstock_queue_over_age_share"}
    assert shares == {"1": 0.25, "2": 0.0} | {str(number): 1.0 for number in range(3, 11)}
    lags = {s.labels["server"]: s.value for s in samples if s.name == "penstock_queue_server_version_lag"}
    assert lags == {"s0": 1, "s1": 0, "ahead": 0}


async def finished(lengths: list[int]) -> Sequence[LengthDecile]:
    """The deciles of a run with one finished episode of each number of response tokens."""
    queue = MemoryTransferQueue()
    await queue.create_run(Limits(1, len(lengths), 0), "x")
    await queue.submit(tasks(len(lengths)), cursor=at(len(lengths)))
    for lease, tokens in zip(await queue.lease_episodes("worker", len(lengths), 0), lengths, strict=True):
        await queue.complete(lease, trajectory(lease, tokens=tokens - 1))
    return (await queue.status()).over_age


async def test_deciles_name_lengths_to_within_a_twelfth() -> None:
    """At most 2 ** (n / 12) - 1 tokens, for the first whole n with which that is more than the length."""
    found = await finished([1, 2, 3, 4, 7, 15, 30, 63, 126, 901])
    assert [row.tokens_up_to for row in found] == [1, 2, 3, 4, 7, 15, 30, 66, 126, 911]
    assert [(row.episodes, row.over_age) for row in found] == [(1, 0)] * 10


async def test_deciles_divide_a_bucket_evenly() -> None:
    found = await finished([3] * 16 + [30] * 4)
    assert [(row.tokens_up_to, row.episodes) for row in found] == [(3, 2)] * 8 + [(30, 2)] * 2
    assert sum(row.episodes for row in await finished([3] * 3)) == 3


KEY, GROUP, ENTRY = 110, 350, 240
"""What Redis needs for a key, a group and an entry of a journal, besides the bytes themselves."""
MIB, PIECE = 1 << 20, (1 << 20) - 64


@pytest.mark.parametrize(
    ("cost", "size", "expected"),
    [
        *((task_cost, *sizes) for sizes in ((243, 256), (244, 256), (245, 320), (500, 512), (501, 640))),
        *((journal_cost, *sizes) for sizes in ((96, 112), (104, 128), (116, 128), (117, 160), (244, 256), (248, 320))),
        *(
            (payload_cost, *sizes)
            for sizes in ((1000, 1024), (PIECE, MIB), (PIECE + 88, MIB + 112), (2 * PIECE, 2 * MIB))
        ),
    ],
)
def test_costs_are_those_of_the_allocators_size_classes(cost: Callable[[int], int], size: int, expected: int) -> None:
    """Twelve bytes stand around what is stored; payloads lie in pieces of a key each."""
    keys = -(-size // PIECE) if cost is payload_cost else 1
    besides = {task_cost: KEY + GROUP, journal_cost: ENTRY, payload_cost: keys * KEY}[cost]
    assert cost(size) == expected + besides


@pytest.mark.parametrize(("split", "counted"), [("train", 0), ("eval/1", 1)])
async def test_episodes_of_a_training_task_count_once_they_may_run(split: str, counted: int) -> None:
    queue = MemoryTransferQueue()
    await queue.create_run(Limits(group_size=1, groups_per_step=1, max_staleness=0), "x")
    await queue.submit([task(0, split)])
    cost = task_cost(len(encode_task(task(0, split))))
    assert (await queue.status()).bytes == cost + counted * MEMBER_COST
    await queue.lease_episodes("worker", 1, 0)
    assert (await queue.status()).bytes == cost + MEMBER_COST


PASSWORD = "a-test-password"
TOKENS = 9_000


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[RedisTransferQueue]:
    """Alone on its server, so that the server's memory is the run's."""
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        log = Archive(tmp_path / "batches")
        await warm_up(server)
        made = await RedisTransferQueue.connect(server.url, "m", TransferQueueConfig(), PASSWORD, archive=log)
        yield made
        await made.close()


async def warm_up(server: RedisServer) -> None:
    """Scripts, buffers and thread caches are Redis's own and stay: what counts is what a run adds to them."""
    first = await RedisTransferQueue.connect(server.url, "w", TransferQueueConfig(), PASSWORD)
    await first.create_run(replace(LIMITS, max_staleness=0), "x")
    await first.submit(tasks(40), cursor=at(40))
    await run_steps(first, 20, spill=False)
    await first.commit(20)
    await first.drop_run()
    await first.close()


async def used(queue: RedisTransferQueue) -> int:
    return int((await queue._connection.info())["used_memory"])


async def settles(queue: RedisTransferQueue, holds: Callable[[int], bool]) -> int:
    """What Redis uses, once `holds` or after a minute: it frees in the background, and its own buffers come and go."""
    deadline = time.monotonic() + 60
    while not holds(found := await used(queue)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return found


def long_task(number: int) -> Task:
    return replace(task(number), messages=[{"role": "user", "content": "x" * 400}])


def long_turn(number: int) -> JournalEntry:
    ids = np.arange(300, dtype=np.int32)
    spans = np.array([[0, 0, 300]], dtype=np.int32)
    return JournalEntry(JournalKind.SAMPLED, number, 1, ids, -ids.astype(np.float32), spans)


EPISODES = 128


@pytest.mark.parametrize("group_size", [pytest.param(1, marks=pytest.mark.deep), 8])
@pytest.mark.redis
async def test_bytes_agree_with_redis_in_every_state(queue: RedisTransferQueue, group_size: int) -> None:
    await queue.create_run(Limits(group_size, EPISODES // group_size, max_staleness=0, min_group=1), "x")
    empty = await used(queue)

    async def agrees(what: str) -> None:
        counted = (await queue.status()).bytes
        found = await settles(queue, lambda total: 0.9 < counted / (total - empty) < 1.1) - empty
        assert 0.9 < counted / found < 1.1, f"{what}: queue {counted}, Redis {found}"

    await queue.submit([long_task(number) for number in range(3000)], cursor=at(3000))
    await agrees("queued")
    leases = await queue.lease_episodes("worker", EPISODES, 0)
    await agrees("leased")
    for lease in leases[: EPISODES // 2]:
        for number in range(4):
            await queue.journal(lease, long_turn(number), number)
    await agrees("journaled")
    sizes = np.random.default_rng(group_size).integers(10, 20_000, len(leases))
    for lease, size in zip(leases, sizes, strict=True):
        await queue.complete(lease, trajectory(lease, tokens=int(size)))
    await agrees("completed")
    await queue.lease_batch(0)
    await queue.publish_version(Announcement(1, {}))
    await queue.commit(1)
    await agrees("committed")


async def run_steps(queue: RedisTransferQueue, steps: int, *, spill: bool) -> list[int]:
    """`steps` steps and no commit; what Redis holds after each."""
    held = []
    for step in range(steps):
        for lease in await queue.lease_episodes("worker", 8, step):
            await queue.complete(lease, trajectory(lease, tokens=TOKENS))
        batch = await train(queue, step)
        if spill:
            await spill_step(queue, step, [name for group in batch.groups for name in group])
        held.append(await used(queue))
    return held


@pytest.mark.redis
async def test_redis_does_not_grow_with_the_checkpoint_interval(queue: RedisTransferQueue) -> None:
    await queue.create_run(replace(LIMITS, max_staleness=0), "x")
    await queue.submit(tasks(100), cursor=at(100))
    step_bytes = 4 * TOKENS * 21  # nine bytes a token, and twelve of spans
    held = await run_steps(queue, 12, spill=True)
    assert max(held) - held[0] < step_bytes
    assert await queue.rewind(0) == 12
    batch = await queue.lease_batch(3)
    assert isinstance(batch, Batch)
    assert [len(t.segments[0].response_ids) for t in await queue.read(batch.groups[0])] == [TOKENS + 1] * 2
    await queue.commit(12)
    assert await queue.held() == set()


@pytest.mark.redis
async def test_committed_steps_give_all_their_memory_back(queue: RedisTransferQueue) -> None:
    await queue.create_run(replace(LIMITS, max_staleness=0), "x")
    await queue.submit(tasks(40), cursor=at(40))
    before = await used(queue)
    await run_steps(queue, 20, spill=False)
    await queue.commit(20)
    assert await settles(queue, lambda total: total - before < 64_000) - before < 64_000  # payloads were 15 MB
    assert (await queue.status()).bytes == 0
