"""Steps and versions in the queue in memory: batches, their payloads, publications and commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.testing.memory_groups import GroupMember, MemoryGroup, split_episode
from penstock.testing.memory_run import MemoryRun
from penstock.transfer_queue.admission import may_ship
from penstock.transfer_queue.codec.trajectories import (
    decode_trajectory,
    fields_of,
    mark_of,
    pack_announcement,
)
from penstock.transfer_queue.errors import (
    BadPayload,
    QueueError,
    StepError,
    TooManyFiltered,
)
from penstock.transfer_queue.ledger import Fate
from penstock.transfer_queue.types import (
    Announcement,
    AnnouncementMark,
    Batch,
    FieldValues,
    Trajectory,
    Waiting,
)

if TYPE_CHECKING:
    from penstock.transfer_queue.archive.archive import Archive


class MemorySteps(MemoryRun):
    """These calls of `TransferQueue`, each of the trainer's fenced by its epoch."""

    def __init__(self, registry_ttl_s: float, clock: Callable[[], float], archive: Archive | None) -> None:
        super().__init__(registry_ttl_s, clock)
        self._archive = archive
        self._epoch = 0

    def _member(self, episode_id: str) -> GroupMember | None:
        task_id, index = split_episode(episode_id)
        group = self._state.groups.get(task_id)
        return group.members[index] if group and index < len(group.members) else None

    def _trajectory(self, episode_id: str) -> Trajectory:
        member = self._member(episode_id)
        if member is not None and member.spilled:
            if self._archive is None:
                raise QueueError(f"{episode_id} was spilled to the run's archive; this queue was made without it")
            step = self._state.groups[split_episode(episode_id)[0]].step
            return self._archive.read(step, [episode_id])[episode_id]
        if member is None or member.payload is None:
            raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
        return decode_trajectory(member.payload)

    async def claim_training(self, holder: str) -> int:
        await self.config()
        self._epoch = self._state.new_fence()
        self._state.epoch, self._state.trainer = self._epoch, holder
        return self._epoch

    def join_training(self, epoch: int) -> None:
        self._epoch = epoch

    async def check_training(self) -> None:
        await self.config()
        self._state.check_epoch(self._epoch)

    async def lease_batch(self, step: int) -> Batch | Waiting:
        await self.check_training()
        state, per_step = self._state, self._state.limits.groups_per_step
        if step in state.batches:
            return Batch(step, [state.groups[task_id].rewarded_episodes() for task_id in state.batches[step]])
        if step != state.next_step:
            raise StepError(
                f"step {step}: the next one is {state.next_step}; steps below {state.committed_step} are committed"
            )
        if step > state.version + 1:
            return Waiting(f"version {step - 1} is not published yet; only one step ahead is leased")
        if state.limits.overage != "mask":
            state.drop_over_age(step)
        limits = state.limits
        if 0 < limits.max_filtered_steps * limits.groups_per_step < state.filtered_since:
            raise TooManyFiltered(
                f"step {step}: {state.filtered_since} groups had equal rewards and were filtered, more than"
                f" {limits.max_filtered_steps} steps of {limits.groups_per_step} (max_filtered_steps)"
            )
        ready = sorted(state.in_state("ready"), key=lambda group: (group.due, group.seq))
        batch, running = ready[:per_step], state.in_state("admitted")
        if len(batch) < per_step:
            queued = len(state.in_state("queued"))
            return Waiting(f"{len(batch)} of {per_step} groups ready; {len(running)} in flight, {queued} queued")
        ended_dues, running_dues = [g.due for g in ready[per_step:]], [g.due for g in running]
        if state.limits.overage == "wait" and not may_ship(ended_dues, running_dues, step, per_step):
            return Waiting(f"slow groups are due: {_slow_names(running)}")
        return self._ship(step, sorted(batch, key=lambda group: group.seq))

    def _ship(self, step: int, batch: list[MemoryGroup]) -> Batch:
        for group in batch:
            self._state.ship(group, step)
        self._state.filtered_since = 0
        self._state.batches[step] = [group.task.task_id for group in batch]
        self._state.next_step += 1
        return Batch(step, [group.rewarded_episodes() for group in batch])

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        return [self._trajectory(episode_id) for episode_id in episode_ids]

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        return [fields_of(self._trajectory(episode_id), fields) for episode_id in episode_ids]

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        await self.check_training()
        if step >= self._state.version:
            raise StepError(f"spill of step {step}: version {step + 1} is not published")
        trained = {
            e for name in self._state.batches.get(step, []) for e in self._state.groups[name].rewarded_episodes()
        }
        members = {name: self._member(name) for name in episode_ids if name in trained}
        stored = {name: member for name, member in members.items() if member is not None and member.payload is not None}
        for member in stored.values():
            member.payload, member.spilled = None, True
        self._state.counts["spilled"] += len(stored)
        return len(stored)

    async def drop_lost(self, step: int, episode_ids: Sequence[str]) -> int:
        await self.check_training()
        state, gone = self._state, set(episode_ids)
        if step not in state.batches:
            raise StepError(
                f"lost payloads of step {step}: fixed steps are {state.committed_step} to {state.next_step - 1}"
            )
        groups = [state.groups[name] for name in state.batches[step]]
        remaining = [group for group in groups if state.keeps_enough(group, gone)]
        leaving = [
            name for group in groups for name in group.rewarded_episodes() if group not in remaining or name in gone
        ]
        members = [(name, member) for name in leaving if (member := self._member(name)) is not None]
        state.book_fate(Fate.PAYLOAD_LOST, members)
        for _, member in members:
            member.payload, member.spilled, member.reward = None, False, None
        state.batches[step] = [group.task.task_id for group in remaining]
        state.counts["payload_lost"] += len(leaving)
        # Its publication counted them as trained; the account would have them in two places.
        state.counts["trained"] -= len(leaving) if step < state.version else 0
        state.counts["payload_lost_groups"] += len(groups) - len(remaining)
        for group in groups:
            if group not in remaining:
                del state.groups[group.task.task_id]
        return len(leaving)

    async def pass_step(self, step: int) -> bool:
        await self.check_training()
        if step != self._state.version:
            return False
        if step != self._state.next_step:
            return self._state.batches.get(step) == []
        self._state.batches[step] = []
        self._state.next_step += 1
        return True

    async def publish_version(self, announcement: Announcement) -> bool:
        await self.check_training()
        version = announcement.version
        if version <= self._state.version:
            return False
        if version != self._state.version + 1 or version > self._state.next_step:
            raise StepError(
                f"version {version} after {self._state.version}: step {version - 1} is out of order or was never leased"
            )
        groups = [self._state.groups[name] for name in self._state.batches.get(version - 1, [])]
        rewarded = [(n, one) for group in groups for n, one in group.named_members() if one.rewarded]
        self._state.counts["trained"] += len(rewarded)
        self._state.book_fate(Fate.TRAINED, rewarded)
        self._state.version, self._state.announcement = version, announcement
        return True

    async def renew_manifest(self, announcement: Announcement) -> bool:
        await self.check_training()
        if announcement.version != self._state.version:
            return False
        self._state.announcement = announcement
        return True

    async def commit(self, step: int, batches: Mapping[int, Sequence[Sequence[str]]] | None = None) -> None:
        await self.check_training()
        state, known = self._state, batches or {}
        for lost in range(state.next_step, step):
            if lost not in known:
                raise StepError(
                    f"commit of {step}: step {lost} was never leased here; steps below {state.next_step} were"
                )
        for done in range(state.committed_step, step):
            if done in state.batches:
                self._forget_fixed(done)
            else:
                self._forget_trained(known[done])
        if batches is not None and step > state.version:
            state.next_step, state.version = max(step, state.next_step), step
            state.announcement = None
        state.committed_step = max(state.committed_step, step)

    def _forget_fixed(self, step: int) -> None:
        state = self._state
        groups = [state.groups.pop(name) for name in state.batches.pop(step)]
        rewarded = [(n, one) for group in groups for n, one in group.named_members() if one.rewarded]
        state.counts["committed"] += len(rewarded)
        if step >= state.version:
            state.counts["trained"] += len(rewarded)
            state.book_fate(Fate.TRAINED, rewarded)
        state.counts["committed_groups"] += len(groups)

    def _forget_trained(self, groups: Sequence[Sequence[str]]) -> None:
        """Remove the groups of a step that is in a checkpoint and that this queue has lost, from any state."""
        state = self._state
        for episodes in groups:
            task_id, _ = split_episode(episodes[0])
            state.counts["trained"] += len(episodes)
            state.counts["committed"] += len(episodes)
            state.counts["committed_groups"] += 1
            group = state.groups.pop(task_id, None)
            known = dict(group.named_members()) if group else {}
            state.book_fate(Fate.TRAINED, [(name, known.get(name, GroupMember())) for name in episodes])
            finished = set() if group is None else {group.episode(i) for i, m in enumerate(group.members) if m.payload}
            state.counts["completed"] += len(set(episodes) - finished)
            state.counts["unrewarded"] += len(finished - set(episodes))
            if group is None:
                state.trained_ahead.add(task_id)
                state.counts["submitted"] += 1

    async def rewind(self, step: int) -> int:
        if not self._state.committed_step <= step <= self._state.next_step:
            raise StepError(
                f"rewind to {step}: batches from {self._state.committed_step} to {self._state.next_step} are kept"
            )
        return self._state.next_step - step

    async def latest_version(self) -> Announcement | None:
        return self._state.announcement

    async def latest_mark(self) -> AnnouncementMark | None:
        announcement = self._state.announcement
        return None if announcement is None else mark_of(announcement.version, pack_announcement(announcement))

    async def held(self) -> set[str]:
        here = [group for group in self._state.groups.values() if group.state in ("admitted", "ready", "shipped")]
        return {
            group.episode(index)
            for group in here
            for index, member in enumerate(group.members)
            if member.payload is not None or member.spilled
        }


def _slow_names(groups: list[MemoryGroup], limit: int = 5) -> str:
    """The running groups with the earliest due step."""
    first = sorted(groups, key=lambda group: (group.due, group.seq))[:limit]
    return ", ".join(f"{group.task.task_id} by step {group.due}" for group in first)
