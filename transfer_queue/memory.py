"""The queue in the memory of one process: the same answers as Redis, without persistence.

For unit tests, and the model that the Redis queue is tested against. `memory_state` holds the state and its
transitions; this class implements the protocol on top of it.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.transfer_queue.admission import check_limits, may_ship
from penstock.transfer_queue.batch_log import BatchLog
from penstock.transfer_queue.codec.trajectories import (
    decode_task,
    decode_trajectory,
    encode_journal,
    encode_task,
    get_fields,
)
from penstock.transfer_queue.memory_groups import TRAIN, GroupMember, MemoryGroup, split_episode
from penstock.transfer_queue.memory_state import MemoryState
from penstock.transfer_queue.metrics import MEMBER_COST, bucket_of, deciles, journal_cost, task_cost
from penstock.transfer_queue.types import (
    KEPT_UPDATES,
    Announcement,
    BadPayload,
    Batch,
    DataCursor,
    DeadLetter,
    FieldValues,
    Head,
    JournalEntry,
    JournalMismatch,
    Lease,
    LeaseLost,
    Limits,
    NoSuchRun,
    Outcome,
    QueueError,
    RunIdentity,
    RunRecord,
    RunTaken,
    ServerInfo,
    Status,
    StepError,
    Task,
    TooManyFiltered,
    Trajectory,
    Waiting,
    WeightUpdate,
)
from penstock.transfer_queue.validation import check_tasks, finish


class MemoryTransferQueue:
    """`TransferQueue` in memory. `clock` (seconds) is the queue's time, for tests of leases."""

    def __init__(
        self,
        *,
        registry_ttl_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
        batch_log: BatchLog | None = None,
    ) -> None:
        self._clock = clock
        self._batch_log = batch_log
        self._registry_ttl_s = registry_ttl_s
        self._epoch = 0
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._state = MemoryState(self._clock)
        self._config: str | None = None
        self._identity = RunIdentity("", "", "")
        self._created = 0.0
        self._head: tuple[str, float] = ("", 0.0)
        self._servers: dict[str, tuple[ServerInfo, float]] = {}
        self._updates: deque[WeightUpdate] = deque(maxlen=KEPT_UPDATES)
        self._waits: Counter[str] = Counter()

    async def create_run(self, limits: Limits, config: str, identity: RunIdentity | None = None) -> RunRecord | None:
        check_limits(limits)
        found = None
        if self._config is not None:
            if self._is_another(config, identity):
                raise RunTaken("in memory", self._identity, identity or RunIdentity("", "", ""))
            if self._state.limits != limits:
                raise QueueError(f"the run exists with other limits: {self._state.limits}, not {limits}")
            found = RunRecord(self._identity, self._clock() - self._created)
        else:
            self._created = self._clock()
        self._state.limits, self._config, self._identity = limits, config, identity or self._identity
        return found

    def _is_another(self, config: str, identity: RunIdentity | None) -> bool:
        if identity is None or not self._identity.run_id:
            return self._config != config
        return (identity.run_id, identity.model) != (self._identity.run_id, self._identity.model)

    async def claim_head(self, holder: str, ttl_s: float, dead: str = "") -> Head | None:
        known, until = self._head
        if known not in ("", holder, dead) and until > self._clock():
            return Head(known, until - self._clock())
        self._head = holder, self._clock() + ttl_s
        return None

    async def release_head(self, holder: str) -> None:
        if self._head[0] == holder:
            self._head = ("", 0.0)

    async def config(self) -> str:
        if self._config is None:
            raise NoSuchRun("no such run: create_run comes first")
        return self._config

    async def drop_run(self) -> int:
        keys = len(self._state.groups) + (self._config is not None)
        self._forget_everything()
        return keys

    async def close(self) -> None:
        return None

    def beside(self) -> MemoryTransferQueue:
        """Another client of the run that this one has created, with a trainer epoch of its own."""
        other = copy.copy(self)
        other._epoch = 0
        return other

    def _member(self, episode_id: str) -> GroupMember | None:
        task_id, index = split_episode(episode_id)
        group = self._state.groups.get(task_id)
        return group.members[index] if group and index < len(group.members) else None

    def _payload(self, episode_id: str) -> bytes:
        member = self._member(episode_id)
        if member is not None and member.spilled and self._batch_log is not None:
            return self._batch_log.read(None, [episode_id])[episode_id]
        if member is None or member.payload is None:
            raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
        return member.payload

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
        """Adds to `leases`. False where the worker takes no more: it has enough, or is emptied for a suspect."""
        state, held, room = self._state, self._state.holds(worker), self._state.room_of(worker)
        for group, index in state.open_episodes(train=train, version=version):
            if len(leases) >= count or (room is not None and room <= 0):
                break
            most = group.members[index].most_together
            if most is not None and held >= most:
                if state.make_room(worker):
                    return False
                continue
            leases.append(self._lease(worker, group, index))
            held, room = held + 1, state.room_of(worker)
        return len(leases) < count and (room is None or room > 0)

    def _lease(self, worker: str, group: MemoryGroup, index: int) -> Lease:
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

    async def journal(self, lease: Lease, entry: JournalEntry, position: int) -> None:
        packed = encode_journal(entry)
        size = journal_cost(len(packed))
        _, member = self._state.owned(lease.episode_id, lease.fence)
        kept = [known for known, _ in member.journal]
        if position < len(kept) and encode_journal(kept[position]) == packed:
            return
        if position != len(kept):
            raise JournalMismatch(lease.episode_id, position, len(kept))
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
        self._state.give_up(group, index, outcome)
        return False

    async def release(self, lease: Lease) -> None:
        try:
            _, member = self._state.owned(lease.episode_id, lease.fence)
        except LeaseLost:
            return
        member.state, member.fence = "queued", self._state.new_fence()

    # steps and versions ----------------------------------------------------------------------------------------------
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
        self._check_filtered(step)
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

    def _check_filtered(self, step: int) -> None:
        filtered, limits = self._state.filtered_since, self._state.limits
        if 0 < limits.max_filtered_steps * limits.groups_per_step < filtered:
            raise TooManyFiltered(
                f"step {step}: {filtered} groups had equal rewards and were filtered, more than"
                f" {limits.max_filtered_steps} steps of {limits.groups_per_step} (max_filtered_steps)"
            )

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        return [decode_trajectory(self._payload(episode_id)) for episode_id in episode_ids]

    async def get(
        self, episode_ids: Sequence[str], fields: Sequence[str], start: int = 0, stop: int | None = None
    ) -> list[FieldValues]:
        return [get_fields(self._payload(episode_id), fields, start, stop) for episode_id in episode_ids]

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        if self._batch_log is None:
            raise QueueError("spill: this queue was made without a batch log")
        await self.check_training()
        if step >= self._state.version:
            raise StepError(f"spill of step {step}: version {step + 1} is not published")
        trained = {
            e for name in self._state.batches.get(step, []) for e in self._state.groups[name].rewarded_episodes()
        }
        members = {name: self._member(name) for name in episode_ids if name in trained}
        held = {name: member for name, member in members.items() if member is not None and member.payload is not None}
        if held:
            blobs = {name: member.payload for name, member in held.items() if member.payload is not None}
            self._batch_log.append(step, blobs, secrets.token_hex(8))
        for member in held.values():
            member.payload, member.spilled = None, True
        self._state.counts["spilled"] += len(held)
        return len(held)

    async def drop_lost(self, step: int, episode_ids: Sequence[str]) -> int:
        await self.check_training()
        state, gone = self._state, set(episode_ids)
        if step not in state.batches:
            raise StepError(
                f"lost payloads of step {step}: fixed steps are {state.committed_step} to {state.next_step - 1}"
            )
        groups = [state.groups[name] for name in state.batches[step]]
        kept = [group for group in groups if state.keeps_enough(group, gone)]
        if not kept:
            raise BadPayload(f"step {step}: the payloads of too many episodes are gone, no group of it is left")
        leaving = [name for group in groups for name in group.rewarded_episodes() if group not in kept or name in gone]
        for name in leaving:
            self._forget_payload(name)
        state.batches[step] = [group.task.task_id for group in kept]
        state.counts["payload_lost"] += len(leaving)
        # Its publication counted them as trained; the account would have them in two places.
        state.counts["trained"] -= len(leaving) if step < state.version else 0
        state.counts["payload_lost_groups"] += len(groups) - len(kept)
        for group in groups:
            if group not in kept:
                del state.groups[group.task.task_id]
        return len(leaving)

    def _forget_payload(self, episode_id: str) -> None:
        member = self._member(episode_id)
        assert member is not None
        member.payload, member.spilled, member.reward = None, False, None

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
        self._state.counts["trained"] += sum(len(group.rewarded_episodes()) for group in groups)
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
        if self._batch_log is not None:
            self._batch_log.drop_below(step)

    def _forget_fixed(self, step: int) -> None:
        state = self._state
        groups = [state.groups.pop(name) for name in state.batches.pop(step)]
        episodes = sum(len(group.rewarded_episodes()) for group in groups)
        state.counts["committed"] += episodes
        state.counts["trained"] += episodes if step >= state.version else 0
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

    async def held(self) -> set[str]:
        here = [group for group in self._state.groups.values() if group.state in ("admitted", "ready", "shipped")]
        return {
            f"{group.task.task_id}#{index}"
            for group in here
            for index, member in enumerate(group.members)
            if group.is_train and (member.payload is not None or member.spilled)
        }

    # servers, other splits, dead letters and numbers -----------------------------------------------------------------
    async def heartbeat(self, server: ServerInfo) -> None:
        self._servers[server.server_id] = (server, self._clock() + self._registry_ttl_s)

    async def deregister(self, server_id: str) -> None:
        self._servers.pop(server_id, None)

    async def servers(self) -> list[ServerInfo]:
        now = self._clock()
        live = [
            replace(info, age_s=self._registry_ttl_s - (expires_at - now))
            for info, expires_at in self._servers.values()
            if expires_at > now
        ]
        return sorted(live, key=lambda info: info.server_id)

    async def report_update(self, update: WeightUpdate) -> None:
        self._updates.append(update)

    async def updates(self) -> list[WeightUpdate]:
        return list(self._updates)

    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        groups = [group for group in self._state.groups.values() if group.task.split == split]
        done = [member.payload for group in groups for member in group.members if member.payload is not None]
        return [decode_trajectory(blob) for blob in done], sum(not group.ended for group in groups)

    async def drop_split(self, split: str) -> None:
        _refuse_train(split)
        for name in [name for name, group in self._state.groups.items() if group.task.split == split]:
            del self._state.groups[name]
            self._state.drop_letter(f"{name}#0")

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        self._waits[f"{role}:{cause}"] += seconds  # type: ignore[assignment]

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


def _describe(group: MemoryGroup, index: int) -> Lease:
    member = group.members[index]
    journal = [entry for entry, _ in member.journal]
    return Lease(group.episode(index), group.task, index, member.attempts, member.fence, group.floor, journal)


def _place(cursor: DataCursor) -> str:
    return f"{cursor.epoch}:{cursor.index}"


def _slow_names(groups: list[MemoryGroup], limit: int = 5) -> str:
    """The running groups with the earliest due step."""
    first = sorted(groups, key=lambda group: (group.due, group.seq))[:limit]
    return ", ".join(f"{group.task.task_id} by step {group.due}" for group in first)


def _refuse_train(split: str) -> None:
    if split == TRAIN:
        raise QueueError("split train cannot be dropped by itself; drop the run")
