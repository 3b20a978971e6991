"""The queue in the memory of one process: the same answers as Redis, without persistence.

For unit tests, and the model that the Redis queue is tested against. `memory_state` holds the state and its
transitions; the protocol is implemented on top of it: the run itself in `memory_run`, its steps and versions in
`memory_steps`, the rest here.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.testing.memory_groups import TRAIN, MemoryGroup, split_episode
from penstock.testing.memory_steps import MemorySteps
from penstock.transfer_queue.admission import most_together
from penstock.transfer_queue.codec.trajectories import (
    decode_task,
    decode_trajectory,
    encode_journal,
    encode_task,
)
from penstock.transfer_queue.errors import (
    BadPayload,
    JournalMismatch,
    LeaseLost,
    QueueError,
    StepError,
)
from penstock.transfer_queue.metrics import MEMBER_COST, bucket_of, deciles, journal_cost, task_cost
from penstock.transfer_queue.status import Status
from penstock.transfer_queue.types import (
    KEPT_FAILURES,
    OTHER_FAILURES,
    DataCursor,
    DeadLetter,
    JournalEntry,
    Lease,
    Origin,
    Outcome,
    Task,
    Trajectory,
    count_sampled,
)
from penstock.transfer_queue.validation import check_tasks, finish

if TYPE_CHECKING:
    from penstock.transfer_queue.archive.archive import Archive


class MemoryTransferQueue(MemorySteps):
    """`TransferQueue` in memory. `clock` (seconds) is the queue's time, for tests of leases."""

    def __init__(
        self,
        *,
        registry_ttl_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
        archive: Archive | None = None,
    ) -> None:
        super().__init__(registry_ttl_s, clock, archive)

    async def drop_run(self) -> int:
        keys = len(self._state.groups) + (self._config is not None)
        self._forget_everything()
        return keys

    async def close(self) -> None:
        return None

    def beside(self) -> MemoryTransferQueue:
        """Another client of the run that this one has created, with a separate trainer epoch."""
        other = copy.copy(self)
        other._epoch = 0
        return other

    # tasks, leases and endings ---------------------------------------------------------------------------------------
    async def submit(
        self, tasks: Sequence[Task], cursor: DataCursor | None = None, after: DataCursor | None = None
    ) -> int:
        await self.config()
        check_tasks(tasks)
        state = self._state
        packed = {task.task_id: encode_task(task) for task in tasks}
        if cursor is not None and cursor <= state.cursor:
            return 0
        if after is not None and after > state.cursor:
            raise StepError(f"submit after {_place(after)}: the tasks after {_place(state.cursor)} are not here")
        new = {
            name: blob for name, blob in packed.items() if name not in state.groups | dict.fromkeys(state.trained_ahead)
        }
        state.trained_ahead -= set(packed)
        for blob in new.values():
            task = decode_task(blob)
            state.add_group(task, task_cost(len(blob)), MEMBER_COST)
            state.counts["submitted"] += task.split == TRAIN
        state.cursor = state.cursor if cursor is None else cursor
        return len(new)

    async def cursor(self) -> DataCursor:
        return self._state.cursor

    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        await self.config()
        self._state.take_back_expired()
        leases: list[Lease] = []
        may_take = self._give_open(worker, count, version, leases, train=False)
        may_take = may_take and self._give_open(worker, count, version, leases, train=True)
        while may_take and self._state.admit(version):
            may_take = self._give_open(worker, count, version, leases, train=True)
        return leases

    def _give_open(self, worker: str, count: int, version: int, leases: list[Lease], *, train: bool) -> bool:
        """Adds open episodes to `leases`, oldest first. Returns whether the worker takes more.

        An episode that lost leases and needs an emptier worker waits for the emptiest one, which takes nothing until
        it holds few enough. For other workers it holds up only others that lost leases: they would end more workers
        at once.
        """
        state, one_waits = self._state, False
        count_held, most = state.holds(worker)
        for group, index in state.open_episodes(train=train, version=version):
            if len(leases) >= count or count_held >= most:
                return False
            losses = len(group.members[index].lost_by)
            bound = min(most, most_together(losses))
            if count_held >= bound and state.is_emptiest(worker):
                return False
            one_waits = one_waits or count_held >= bound
            if not (one_waits and losses):
                leases.append(self._lease(worker, group, index))
                count_held, most = count_held + 1, bound
        return len(leases) < count and count_held < most

    def _lease(self, worker: str, group: MemoryGroup, index: int) -> Lease:
        member = group.members[index]
        fence = self._state.new_fence()
        member.worker, member.fence = worker, fence
        self._state.hold(member)
        return _describe(group, index, fence)

    async def adopt(self, episode_id: str, fence: int) -> Lease:
        group, _ = self._state.owned(episode_id, fence)
        return _describe(group, split_episode(episode_id)[1], fence)

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        lost = []
        for lease in leases:
            try:
                self._state.owned(lease.episode_id, lease.fence)
            except LeaseLost:
                lost.append(lease.episode_id)
        return lost

    async def journal(self, lease: Lease, entry: JournalEntry, position: int) -> None:
        packed = encode_journal(entry)
        size = journal_cost(len(packed))
        _, member = self._state.owned(lease.episode_id, lease.fence)
        entries = [known for known, _ in member.journal]
        if position < len(entries) and encode_journal(entries[position]) == packed:
            return
        if position != len(entries):
            raise JournalMismatch(lease.episode_id, position, len(entries))
        member.journal.append((entry, size))
        member.tokens += count_sampled([entry])

    async def fork(self, lease: Lease, turn: int, prefix: Sequence[JournalEntry], count: int) -> list[str]:
        group, member = self._state.owned(lease.episode_id, lease.fence)
        origin = Origin(lease.episode_id, turn, len(prefix), count_sampled(prefix))
        if not self._branches(group, origin):
            if len(member.journal) < len(prefix):
                raise JournalMismatch(lease.episode_id, len(prefix), len(member.journal))
            self._state.fork(group, origin, member.journal[: len(prefix)], count)
        return self._branches(group, origin)

    @staticmethod
    def _branches(group: MemoryGroup, origin: Origin) -> list[str]:
        """Returns the branches that leave `origin.parent` at this turn."""
        origins = {name: one.origin for name, one in group.named_members() if one.origin is not None}
        return [name for name, one in origins.items() if (one.parent, one.turn) == (origin.parent, origin.turn)]

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        await self.config()
        result = finish(lease, trajectory)
        known = self._member(lease.episode_id)
        if known is not None and (known.state, known.fence) == ("done", lease.fence):
            return
        group, member = self._state.owned(lease.episode_id, lease.fence)
        if result.highest_version > self._state.version:
            raise BadPayload(f"version_spans: version {result.highest_version} is newer than {self._state.version}")
        member.state, member.payload, member.reward = "done", result.packed.joined(), result.reward
        member.outcome, member.journal = trajectory.outcome, []
        member.tokens, member.sampled, member.lowest_version = result.tokens, result.sampled, result.lowest_version
        if group.is_train:
            self._state.counts["completed"] += 1
            self._state.lengths[bucket_of(result.tokens)] += 1
        self._state.count_ended(group)

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        known = self._member(lease.episode_id)
        if known is not None and known.failed_fence == lease.fence:
            return known.state != "failed"
        group, member = self._state.owned(lease.episode_id, lease.fence)
        member.attempts, member.failed_fence = member.attempts + 1, lease.fence
        if group.is_train:
            failures, text = self._state.failures, outcome.failure
            failures[text if text in failures or len(failures) < KEPT_FAILURES else OTHER_FAILURES] += 1
        if member.attempts < self._state.limits.max_attempts:
            member.state, member.fence = "queued", self._state.new_fence()
            self._state.counts["retried"] += group.is_train
            return True
        self._state.give_up(group, split_episode(lease.episode_id)[1], outcome)
        return False

    async def release(self, lease: Lease) -> None:
        try:
            _, member = self._state.owned(lease.episode_id, lease.fence)
        except LeaseLost:
            return
        member.state, member.fence = "queued", self._state.new_fence()

    # other splits, dead letters and numbers -----------------------------------------------------------------
    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        groups = [group for group in self._state.groups.values() if group.task.split == split]
        done = [member.payload for group in groups for member in group.members if member.payload is not None]
        return [decode_trajectory(blob) for blob in done], sum(not group.ended for group in groups)

    async def drop_split(self, split: str) -> None:
        if split == TRAIN:
            raise QueueError("split train cannot be dropped by itself; drop the run")
        for name in [name for name, group in self._state.groups.items() if group.task.split == split]:
            del self._state.groups[name]
            self._state.drop_letter(f"{name}#0")

    async def status(self) -> Status:
        state = self._state
        workers = Counter(member.worker for _, _, member in state.leased())
        ages = {name: state.age_s(name) for name in ("queued", "admitted", "ready")}
        return Status(
            version=state.version,
            step=state.next_step,
            committed_step=state.committed_step,
            groups=state.count_groups(),
            episodes=state.count_episodes(),
            bytes=state.held_bytes(),
            parked=state.parked(),
            unconsumed_bytes=state.waiting_bytes(),
            waits_s=dict(self._waits),
            failures=dict(state.failures),
            workers=dict(workers),
            other_splits=state.count_splits(),
            ages_s={name: age for name, age in ages.items() if age is not None},
            over_age=deciles(state.lengths, state.over_age_lengths),
        )

    async def dead_letters(self, limit: int = 100, start: int = 0) -> list[DeadLetter]:
        return list(self._state.letters.values())[start : start + limit]

    async def dead_letter(self, episode_id: str) -> DeadLetter | None:
        return self._state.letters.get(episode_id)

    async def requeue(self, episode_id: str) -> None:
        if episode_id not in self._state.letters:
            raise QueueError(f"{episode_id}: no such dead letter")
        task_id, _ = split_episode(episode_id)
        group = self._state.groups.get(task_id)
        if group is None or group.state not in ("dead", "done"):
            raise QueueError(f"{episode_id}: its group continued without it; there is nothing to queue again")
        for index in range(len(group.members)):
            self._state.drop_letter(group.episode(index))
        self._state.revive(group)


def _describe(group: MemoryGroup, index: int, fence: int) -> Lease:
    member = group.members[index]
    journal = [entry for entry, _ in member.journal]
    return Lease(group.episode(index), group.task, index, member.attempts, fence, group.floor, journal, member.origin)


def _place(cursor: DataCursor) -> str:
    return f"{cursor.epoch}:{cursor.index}"
