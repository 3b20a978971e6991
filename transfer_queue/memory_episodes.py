"""The in-memory queue's tasks, leases and endings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.transfer_queue.accounting import MEMBER_COST, journal_cost, task_cost
from penstock.transfer_queue.checks import check_tasks, finish
from penstock.transfer_queue.codec import decode_task, encode_journal, encode_task
from penstock.transfer_queue.lengths import bucket_of
from penstock.transfer_queue.memory_run import MemoryRun
from penstock.transfer_queue.memory_state import TRAIN, Group, split_episode
from penstock.transfer_queue.queue import BadPayload, DeadLetter, Lease, LeaseLost, StepError
from penstock.transfer_queue.trajectory import DataCursor, JournalEntry, Outcome, Task, Trajectory


class MemoryEpisodes(MemoryRun):
    """`TransferQueue` from `submit` to `release`."""

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
        picked = (
            self._state.open_episodes(train=False, version=version)
            + self._state.open_episodes(train=True, version=version)
        )[:count]
        while len(picked) < count and (group := self._state.admit(version)):
            picked += [(group, index) for _, index in sorted((group.episode(i), i) for i in range(len(group.members)))]
        return [self._lease(worker, group, index) for group, index in picked[:count]]

    def _lease(self, worker: str, group: Group, index: int) -> Lease:
        member = group.members[index]
        member.worker, member.fence = worker, self._state.new_fence()
        self._state.hold(member)
        return _describe(group, index)

    async def adopt(self, episode_id: str, fence: int) -> Lease:
        group, _ = self._state.owned(episode_id, fence)
        return _describe(group, split_episode(episode_id)[1])

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        lost = []
        for lease in leases:
            try:
                self._state.owned(lease.episode_id, lease.fence)
            except LeaseLost:
                lost.append(lease.episode_id)
        return lost

    async def journal(self, lease: Lease, entry: JournalEntry) -> None:
        size = journal_cost(len(encode_journal(entry)))
        _, member = self._state.owned(lease.episode_id, lease.fence)
        member.journal.append((entry, size))
        member.tokens += 0 if entry.ids is None else len(entry.ids)

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        result = finish(lease, trajectory)
        if self._is_repeat(lease):
            return
        group, member = self._state.owned(lease.episode_id, lease.fence)
        if result.highest_version > self._state.version:
            raise BadPayload(f"version_spans: version {result.highest_version} is newer than {self._state.version}")
        member.state, member.payload, member.reward = "done", result.packed.joined(), result.reward
        member.outcome, member.journal = trajectory.outcome, []
        member.tokens, member.lowest_version = result.tokens, result.lowest_version
        if group.is_train:
            self._state.counts["completed"] += 1
            self._state.lengths[bucket_of(result.tokens)] += 1
        if group.ended:
            self._state.end_group(group)

    def _is_repeat(self, lease: Lease) -> bool:
        task_id, index = split_episode(lease.episode_id)
        group = self._state.groups.get(task_id)
        return group is not None and (group.members[index].state, group.members[index].fence) == ("done", lease.fence)

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        task_id, index = split_episode(lease.episode_id)
        known = self._state.groups.get(task_id)
        if known is not None and known.members[index].failed_fence == lease.fence:
            return known.members[index].state != "failed"
        group, member = self._state.owned(lease.episode_id, lease.fence)
        member.attempts, member.failed_fence = member.attempts + 1, lease.fence
        if member.attempts < self._state.limits.max_attempts:
            member.state, member.fence = "queued", self._state.new_fence()
            self._state.counts["retried"] += group.is_train
            return True
        self._give_up(lease.episode_id, group, index, outcome)
        return False

    def _give_up(self, episode_id: str, group: Group, index: int, outcome: Outcome) -> None:
        member = group.members[index]
        letter = DeadLetter(episode_id, outcome, member.attempts, [entry for entry, _ in member.journal])
        self._state.put_letter(letter, [size for _, size in member.journal])
        member.state, member.outcome, member.journal = "failed", outcome, []
        self._state.counts["failed"] += group.is_train
        if group.ended:
            self._state.end_group(group)

    async def release(self, lease: Lease) -> None:
        try:
            _, member = self._state.owned(lease.episode_id, lease.fence)
        except LeaseLost:
            return
        member.state, member.fence = "queued", self._state.new_fence()


def _describe(group: Group, index: int) -> Lease:
    member = group.members[index]
    journal = [entry for entry, _ in member.journal]
    return Lease(group.episode(index), group.task, index, member.attempts, member.fence, group.floor, journal)


def _place(cursor: DataCursor) -> str:
    return f"{cursor.epoch}:{cursor.index}"
