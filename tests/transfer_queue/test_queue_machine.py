"""Random interleavings of workers, a trainer, lost leases and crashes, on memory alone (many) and on memory and Redis
side by side (few), where every answer of the two must be the same.

The machine keeps its own, much simpler books and checks after every step:
every submitted group is in exactly one place · no episode in two steps · no shipped token over the bound ·
no more groups in the system than the bound allows.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queue_samples import INFRA, spill, task, trajectory, turn
from redis_cluster import RedisCluster

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    Announcement,
    Archive,
    BadPayload,
    Batch,
    DataCursor,
    Lease,
    Limits,
    QueueError,
    RedisServer,
    RedisTransferQueue,
    Status,
    TransferQueue,
    TransferQueueConfig,
    check_limits,
)

WORKERS = ["a", "b", "c"]
LEASE_TTL_S = 1000.0


def is_possible(limits: Limits) -> bool:
    try:
        check_limits(limits)
    except QueueError:
        return False
    return True


limits_given = st.builds(
    Limits,
    group_size=st.integers(1, 3),
    groups_per_step=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    overage=st.sampled_from(["wait", "wait", "mask", "drop"]),
    min_group=st.integers(1, 3),
    max_attempts=st.integers(1, 2),
    max_lost_leases=st.sampled_from([4, 4, 5]),
    lease_ttl_s=st.just(LEASE_TTL_S),
    max_bytes=st.sampled_from([1, 2000, 1 << 30]),
    max_groups=st.sampled_from([0, 0, 3, 5]),
    filter_groups=st.sampled_from(["none", "none", "zero_variance"]),
    max_filtered_steps=st.sampled_from([0, 3]),
    quotas=st.sampled_from([{}, {}, {"a": 1}, {"a": 1, "b": 2}]),
    branches=st.sampled_from([0, 1, 2]),
).filter(is_possible)


class QueueMachine(RuleBasedStateMachine):
    """Workers hold versions that only grow, up to the published one; the trainer may crash between any two calls."""

    server: RedisServer | RedisCluster | None = None

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-machine-")
        logs = [Archive(Path(self.folder.name) / name) for name in ("memory", "redis")]
        self.memory = MemoryTransferQueue(clock=lambda: self.now, archive=logs[0])
        self.queues: list[TransferQueue] = [self.memory]
        if self.server is not None:
            self.redis = self.loop.run_until_complete(self._connect(self.server, logs[1]))
            self.queues.append(self.redis)
        self.versions = dict.fromkeys(WORKERS, 0)
        self.held: list[tuple[str, Lease]] = []
        self.lost: list[Lease] = []
        self.batches: dict[int, Batch] = {}
        self.oldest: dict[str, int] = {}
        self.version = self.submitted = self.training = 0
        self.step_of: dict[str, int] = {}

    @staticmethod
    async def _connect(server: RedisServer | RedisCluster, log: Archive) -> RedisTransferQueue:
        config, run = TransferQueueConfig(deadline_s=120.0), f"m-{secrets.token_hex(6)}"
        return await RedisTransferQueue.connect(server.url, run, config, "a-test-password", archive=log)

    def teardown(self) -> None:
        for queue in self.queues:
            self.loop.run_until_complete(queue.drop_run())
            self.loop.run_until_complete(queue.close())
        self.loop.close()
        self.folder.cleanup()

    def ask(self, call: Callable[[TransferQueue], Awaitable[Any]]) -> Any:
        """The same call on every queue; the answers, or errors, must agree."""
        answers = [self.loop.run_until_complete(self._answer(call, queue)) for queue in self.queues]
        for answer in answers[1:]:
            assert comparable(answer) == comparable(answers[0])
        return answers[0]

    @staticmethod
    async def _answer(call: Callable[[TransferQueue], Awaitable[Any]], queue: TransferQueue) -> Any:
        try:
            return await call(queue)
        except QueueError as error:
            return type(error)

    @initialize(limits=limits_given)
    def create(self, limits: Limits) -> None:
        self.limits = limits
        self.ask(lambda queue: queue.create_run(limits, "x"))
        self.submit_next(8, min_version=0)

    # workers -------------------------------------------------------------------------------------------------------
    @rule(count=st.integers(1, 6), min_version=st.sampled_from([0, 0, 0, 1]))
    def submit(self, count: int, min_version: int) -> None:
        self.submit_next(count, min_version)

    def submit_next(self, count: int, min_version: int) -> None:
        numbers = range(self.submitted, self.submitted + count)
        sizes = (None, None, 1, 3)
        new = [
            task(n, min_version=min_version, source="abc"[n % 3], priority=n % 5 // 4, group_size=sizes[n % 4])
            for n in numbers
        ]
        cursor = DataCursor(0, self.submitted + count)
        assert self.ask(lambda queue: queue.submit(new, cursor)) == count
        assert self.ask(lambda queue: queue.submit(new, cursor)) == 0
        self.submitted += count

    @rule(number=st.integers(0, 2))
    def evaluate(self, number: int) -> None:
        self.ask(lambda queue: queue.submit([task(number, "eval")]))

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 9))
    def lease(self, worker: str, count: int) -> None:
        leases = self.ask(lambda queue: queue.lease_episodes(worker, count, self.versions[worker]))
        assert len(leases) <= count
        assert all(lease.min_version <= self.versions[worker] for lease in leases)
        self.held += [(worker, lease) for lease in leases]

    @rule(worker=st.sampled_from(WORKERS))
    def pull_weights(self, worker: str) -> None:
        self.versions[worker] = self.version

    @precondition(lambda self: self.held)
    @rule(data=st.data(), position=st.integers(0, 2))
    def journal(self, data: st.DataObject, position: int) -> None:
        """An entry that is there, the next one, or one after a hole."""
        _, lease = data.draw(st.sampled_from(self.held))
        self.ask(lambda queue: queue.journal(lease, turn(position), position))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), entries=st.integers(0, 2), known=st.integers(1, 2), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, entries: int, known: int, count: int) -> None:
        """From a journal that may be shorter."""
        _, lease = data.draw(st.sampled_from(self.held))
        self.fork_one(lease, entries, known, count)

    def fork_one(self, lease: Lease, entries: int, known: int, count: int) -> None:
        """The second call finds the branches of the first."""
        prefix = [turn(position) for position in range(entries)]
        for position in range(known):
            self.ask(lambda queue, at=position: queue.journal(lease, turn(at), at))
        branches = self.ask(lambda queue: queue.fork(lease, entries, prefix, count))
        event(f"forked: {branches if isinstance(branches, type) else len(branches)}")
        assert self.ask(lambda queue: queue.fork(lease, entries, prefix, count)) == branches

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 9), reward=st.sampled_from([1.0, 1.0, 0.0, 0.5, None]))
    def complete(self, data: st.DataObject, count: int, reward: float | None) -> None:
        chosen = data.draw(st.permutations(self.held))[:count]
        for held in chosen:
            self.finish(held, reward)

    def finish(self, held: tuple[str, Lease], reward: float | None) -> None:
        worker, lease = held
        self.held.remove(held)
        sampled = trajectory(lease, self.versions[worker], reward)
        if self.ask(lambda queue: queue.complete(lease, sampled)) is None:
            self.oldest[lease.episode_id] = self.versions[worker]
        self.lost.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 9), rewards=st.lists(st.sampled_from([1.0, 0.5, None]), min_size=1))
    def complete_together(self, data: st.DataObject, count: int, rewards: list[float | None]) -> None:
        """With a lost lease and versions that are not published among them."""
        chosen = data.draw(st.permutations(self.held))[:count]
        lost = [("late", lease) for lease in self.lost[-2:]]
        works = [
            (lease, trajectory(lease, self.versions.get(worker, 0) + number // 5, rewards[number % len(rewards)]))
            for number, (worker, lease) in enumerate([*chosen, *lost])
        ]
        refused = [self.ask(lambda queue, one=one: queue.complete(*one)) for one in works]
        for held, (lease, work), refusal in zip(chosen, works, refused, strict=False):
            event(f"ended together, refused: {refusal}")
            if refusal is BadPayload:
                continue  # it stays leased
            self.held.remove(held)
            self.lost.append(lease)
            if refusal is None and work.min_version is not None:
                self.oldest[lease.episode_id] = work.min_version

    @rule(worker=st.sampled_from(WORKERS), leave=st.integers(0, 2), entries=st.integers(0, 2))
    def work(self, worker: str, leave: int, entries: int) -> None:
        """A worker pulls, fills itself, forks some of what it has and finishes all but a few."""
        self.pull_weights(worker)
        self.lease(worker, 9)
        mine = [held for held in self.held if held[0] == worker]
        for _, lease in mine[:entries]:
            self.fork_one(lease, entries, known=2, count=1)
        for number, held in enumerate(mine[leave:]):
            self.finish(held, 0.5 * (number % 3))

    @rule()
    def go_on_training(self) -> None:
        self.lease_batch(0)
        if self.training in self.batches:
            self.train()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), release=st.booleans())
    def hand_back(self, data: st.DataObject, release: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.ask(lambda queue: queue.release(held[1]) if release else queue.fail(held[1], INFRA))
        self.lost.append(held[1])

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def late_writer(self, data: st.DataObject) -> None:
        """A worker thought dead comes back. Whatever it does must change nothing that counts."""
        lease = data.draw(st.sampled_from(self.lost[-8:]))
        before = self.ask(lambda queue: queue.status())
        self.ask(lambda queue: queue.complete(lease, trajectory(lease)))
        self.ask(lambda queue: queue.release(lease))
        assert self.ask(lambda queue: queue.status()) == before

    @rule()
    def workers_die(self) -> None:
        """All leases run out; their workers keep believing in them."""
        self.now += LEASE_TTL_S + 1
        if self.server is not None:
            self.loop.run_until_complete(self._expire_in_redis())

    async def _expire_in_redis(self) -> None:
        key = self.redis._keys.index + "leases"
        for episode in await self.redis._connection.command("ZRANGE", key, 0, -1):
            await self.redis._connection.command("ZADD", key, 0, episode)

    @rule(workers=st.permutations(WORKERS), times=st.integers(1, 6))
    def workers_die_of_a_row(self, workers: list[str], times: int) -> None:
        """One after the other leases what it gets and dies, until what they died of runs alone and is given up."""
        for number in range(times):
            self.lease(workers[number % len(workers)], 9)
            self.workers_die()
        letters = self.ask(lambda queue: queue.dead_letters())
        event(f"dead of lost leases: {any('died' in letter.outcome.reason for letter in letters)}")

    @precondition(lambda self: self.held)
    @rule()
    def renew(self) -> None:
        self.ask(lambda queue: queue.renew([lease for _, lease in self.held]))

    # trainer -------------------------------------------------------------------------------------------------------
    @rule(ahead=st.integers(0, 1))
    def lease_batch(self, ahead: int) -> None:
        step = self.training + ahead
        batch = self.ask(lambda queue: queue.lease_batch(step))
        if isinstance(batch, Batch):
            assert self.batches.setdefault(step, batch) == batch
            self._check_batch(batch)

    def _check_batch(self, batch: Batch) -> None:
        event("a batch shipped")
        assert len(batch.groups) in (0, self.limits.groups_per_step)
        for episode in [episode for group in batch.groups for episode in group]:
            assert self.step_of.setdefault(episode, batch.step) == batch.step, "trained twice"
            if self.limits.overage != "mask":
                assert batch.step - self.oldest[episode] <= self.limits.max_staleness
        read = self.ask(lambda queue: queue.read([one for group in batch.groups for one in group]))
        assert len(read) == sum(map(len, batch.groups))

    @rule()
    def pass_step(self) -> None:
        step = self.training
        if self.ask(lambda queue: queue.pass_step(step)):
            event("a step was passed")
            assert step == self.version
            assert self.batches.setdefault(step, Batch(step, [])) == Batch(step, [])

    @precondition(lambda self: self.training in self.batches)
    @rule()
    def train(self) -> None:
        """Replayed steps publish nothing new."""
        announcement = Announcement(self.training + 1, {"step": self.training})
        new = self.ask(lambda queue: queue.publish_version(announcement))
        event("trained" if new else "replayed")
        assert new == (self.training >= self.version)
        self.training += 1
        self.version = max(self.version, self.training)

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def crash_of_the_trainer(self, data: st.DataObject) -> None:
        committed = self.ask(lambda queue: queue.status()).committed_step
        step = data.draw(st.integers(committed, self.training))
        fixed = self.ask(lambda queue: queue.status()).step
        assert self.ask(lambda queue: queue.rewind(step)) == fixed - step
        self.training = step

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def spill(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.batches)))
        episodes = [name for group in self.batches[step].groups for name in group]
        share = data.draw(st.lists(st.sampled_from(episodes), unique=True, min_size=1)) if episodes else []
        moved = self.ask(lambda queue: spill(queue, step, share))
        event(f"spilled {moved}")

    @rule(steps=st.integers(1, 2))
    def lose_machine_of_the_queue(self, steps: int) -> None:
        """A checkpoint holds steps that the queue does not know: their groups are anywhere but in a step."""
        status = self.ask(lambda queue: queue.status())
        free = self.memory._state.in_state("queued", "admitted", "ready")
        need = self.limits.groups_per_step
        recorded = {}
        for number in range(min(steps, len(free) // need)):
            chosen = free[number * need : (number + 1) * need]
            groups = [trainable(group) for group in chosen]
            if all(groups):
                recorded[status.step + number] = groups
        if status.step not in recorded:
            return
        event("caught up with a checkpoint")
        step = status.step + (2 if status.step + 1 in recorded else 1)
        self.ask(lambda queue: queue.commit(step, recorded))
        for lost, groups in recorded.items():
            for episode in [episode for group in groups for episode in group]:
                assert self.step_of.setdefault(episode, lost) == lost, "trained twice"
        self.training = self.version = step

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.training))
        self.ask(lambda queue: queue.commit(step))
        event(f"committed {min(step, 3)}")

    @rule()
    def requeue_a_dead_group(self) -> None:
        letters = self.ask(lambda queue: queue.dead_letters())
        if letters:
            event("a dead letter was requeued")
            self.ask(lambda queue: queue.requeue(letters[0].episode_id))

    # books ---------------------------------------------------------------------------------------------------------
    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "limits"):
            return
        status = self.ask(lambda queue: queue.status())
        groups = dict(status.groups)
        assert groups.pop("submitted") == self.submitted == sum(groups.values())
        assert all(count >= 0 for count in [*groups.values(), *status.episodes.values(), status.unconsumed_bytes])
        held = self.ask(lambda queue: queue.held())
        episodes = status.episodes
        reasons = sum(episodes[name] for name in ("dropped", "filtered", "unrewarded", "group_failed", "payload_lost"))
        fixed = {name for step, batch in self.batches.items() for group in batch.groups for name in group}
        assert episodes["completed"] == episodes["committed"] + len(held) + reasons
        assert fixed <= set(self.step_of)
        if self.limits.overage == "wait":
            in_system = groups["admitted"] + groups["ready"] + groups["shipped"]
            assert in_system <= (self.limits.max_staleness + 1) * self.limits.groups_per_step
        if not groups["admitted"] + groups["ready"] + groups["shipped"]:
            assert status.unconsumed_bytes == 0


def trainable(group: Any) -> list[str]:
    """Episodes that a lost step may have held."""
    ended = [m.state == "failed" or (m.state == "done" and not m.rewarded) for m in group.members]
    return [group.episode(index) for index, gone in enumerate(ended) if not gone]


def comparable(answer: Any) -> Any:
    """Lists hold dataclasses with arrays, which only their text compares as a whole. Ages are each queue's own."""
    if isinstance(answer, Status):
        return replace(answer, ages_s=sorted(answer.ages_s))
    return repr(answer) if isinstance(answer, list) else answer


def run_machine(server: RedisServer | RedisCluster | None, examples: int, steps: int) -> None:
    machine = type("Machine", (QueueMachine,), {"server": server})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=checks,
            database=None,
            phases=[Phase.explicit, Phase.generate],
        ),
    )


def test_random_interleavings_in_memory() -> None:
    run_machine(None, examples=60, steps=60)


@pytest.mark.redis
def test_redis_answers_as_memory_does(redis_server: RedisServer) -> None:
    run_machine(redis_server, examples=12, steps=40)


@pytest.mark.redis
def test_a_cluster_answers_as_memory_does(redis_cluster: RedisCluster) -> None:
    run_machine(redis_cluster, examples=6, steps=40)


@pytest.mark.deep
def test_random_interleavings_in_memory_for_long() -> None:
    run_machine(None, examples=500, steps=100)


@pytest.mark.deep
@pytest.mark.redis
def test_redis_answers_as_memory_does_for_long(redis_server: RedisServer) -> None:
    run_machine(redis_server, examples=150, steps=100)
