"""State of an in-memory queue and its transitions, used by `memory_queue.MemoryTransferQueue`.

Each transition that is one Lua script in Redis runs here without an await, so calls do not interleave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from penstock.testing.memory_groups import TRAIN, GroupMember, MemoryGroup, split_episode
from penstock.transfer_queue.admission import enough_members, may_admit, most_together, room_allows, roots_of
from penstock.transfer_queue.errors import LeaseLost, TrainerFenced
from penstock.transfer_queue.ledger import Fate, LedgerEntry
from penstock.transfer_queue.metrics import bucket_of
from penstock.transfer_queue.status import EPISODE_TOTALS
from penstock.transfer_queue.types import (
    Announcement,
    DataCursor,
    DeadLetter,
    JournalEntry,
    Limits,
    Origin,
    Outcome,
    OutcomeKind,
    Task,
)
from penstock.transfer_queue.validation import same_reward


class MemoryState:
    """Groups, batches and counters of one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.limits = Limits(group_size=1, groups_per_step=1, max_staleness=0)
        self.groups: dict[str, MemoryGroup] = {}
        self.batches: dict[int, list[str]] = {}
        """Step → group ids, for fixed and uncommitted steps."""
        self.version = 0
        self.next_step = 0
        self.committed_step = 0
        self.cursor = DataCursor()
        self.trained_ahead: set[str] = set()
        """Tasks that a checkpoint trained and that this queue has lost; they are not queued again."""
        self.filtered_since = 0
        """Groups filtered since the last step was fixed."""
        self.lengths: Counter[int] = Counter()
        self.over_age_lengths: Counter[int] = Counter()
        self.announcement: Announcement | None = None
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.ledger: list[LedgerEntry] = []
        self.letters: dict[str, DeadLetter] = {}
        self.letter_bytes: dict[str, list[int]] = {}
        """Accounted bytes of the journals of dead letters."""
        self.epoch = 0
        self.trainer = ""
        """Holder of `epoch`."""
        self._seq = 0
        self._fence = 0

    # reading -------------------------------------------------------------------------------------------------------
    def in_state(self, *states: str) -> list[MemoryGroup]:
        """Groups of split train in one of `states`, oldest first."""
        groups = [group for group in self.groups.values() if group.is_train and group.state in states]
        return sorted(groups, key=lambda group: group.seq)

    def leased(self) -> Iterator[tuple[MemoryGroup, int, GroupMember]]:
        for group in self.groups.values():
            for index, member in enumerate(group.members):
                if member.state == "leased":
                    yield group, index, member

    def open_episodes(self, train: bool, version: int) -> list[tuple[MemoryGroup, int]]:
        """Episodes that a worker at `version` may take at once: lowest floor first, then oldest group."""
        rows = [
            (group.floor, group.seq, group.episode(index), group, index)
            for group in self.groups.values()
            if group.is_train == train and group.state in ("admitted", "split") and group.floor <= version
            for index, member in enumerate(group.members)
            if member.state == "queued"
        ]
        return [(group, index) for *_, group, index in sorted(rows, key=lambda row: row[:3])]

    def waiting_bytes(self) -> int:
        """Payloads and journals that count for back-pressure."""
        return sum(member.held_bytes for group in self.unconsumed() for member in group.members)

    def held_bytes(self) -> int:
        """All stored bytes, as Redis counts them."""
        members = (member.held_bytes for group in self.groups.values() for member in group.members)
        letters = sum(size for sizes in self.letter_bytes.values() for size in sizes)
        groups = (g.cost + (g.members_cost if g.state != "queued" else 0) for g in self.groups.values())
        return sum(groups) + sum(members) + letters

    def age_s(self, state: str) -> float | None:
        """Time in `state` of its first group; None if there is none."""
        order = {"queued": _queue_rank, "admitted": _due_rank, "ready": _due_rank}[state]
        groups = sorted(self.in_state(state), key=order)
        return self.clock() - groups[0].since if groups else None

    def unconsumed(self) -> list[MemoryGroup]:
        """Groups in the system whose step is not published yet."""
        shipped = [group for group in self.in_state("shipped") if group.step >= self.version]
        return self.in_state("admitted", "ready") + shipped

    def count_groups(self) -> dict[str, int]:
        counts = {name: len(self.in_state(name)) for name in ("queued", "admitted", "ready", "dead")}
        shipped = self.in_state("shipped")
        return counts | {
            "shipped": sum(group.step >= self.version for group in shipped),
            "trained": sum(group.step < self.version for group in shipped),
            "committed": self.counts["committed_groups"],
            "dropped_over_age": self.counts["dropped_over_age"],
            "filtered": self.counts["filtered_groups"],
            "payload_lost": self.counts["payload_lost_groups"],
            "submitted": self.counts["submitted"],
        }

    def count_episodes(self) -> dict[str, int]:
        unended = self.in_state("queued", "admitted")
        queued = sum(member.state == "queued" for group in unended for member in group.members)
        leased = sum(group.is_train for group, _, _ in self.leased())
        return {"queued": queued, "leased": leased} | {name: self.counts[name] for name in EPISODE_TOTALS}

    def count_splits(self) -> dict[str, dict[str, int]]:
        splits: dict[str, Counter[str]] = {}
        for group in self.groups.values():
            if not group.is_train:
                name = {"failed": "done"}.get(group.members[0].state, group.members[0].state)
                splits.setdefault(group.task.split, Counter(queued=0, leased=0, done=0))[name] += 1
        return {split: dict(counts) for split, counts in splits.items()}

    def book(self, entry: LedgerEntry) -> None:
        self.ledger.append(replace(entry, number=self.new_fence()))

    def book_fate(self, fate: Fate, members: Iterable[tuple[str, GroupMember]]) -> None:
        if episodes := [(name, member.sampled) for name, member in members]:
            self.book(LedgerEntry(0, fate=fate, episodes=episodes))

    # episodes ------------------------------------------------------------------------------------------------------
    def add_group(self, task: Task, cost: int, member_cost: int) -> None:
        size = (task.group_size or self.limits.group_size) if task.split == TRAIN else 1
        members = [GroupMember() for _ in range(size)]
        group = MemoryGroup(task, self._seq, members, cost, size * member_cost, self.clock())
        if not group.is_train:
            group.state, group.floor = "split", task.min_version
        self._seq += 1
        self.groups[task.task_id] = group

    def change(self, group: MemoryGroup, state: str) -> None:
        group.state, group.since = state, self.clock()

    def new_fence(self) -> int:
        self._fence += 1
        return self._fence

    def check_epoch(self, epoch: int) -> None:
        """Raises `TrainerFenced` if a later epoch was claimed."""
        if epoch < self.epoch:
            whose = f"trainer epoch {epoch}" if epoch else "a trainer without an epoch"
            raise TrainerFenced(f"{whose}: {self.trainer} has claimed the run, epoch {self.epoch}")
        self.epoch = epoch

    def owned(self, episode_id: str, fence: int) -> tuple[MemoryGroup, GroupMember]:
        """The member that `fence` owns. An expired lease that was not given to another worker is resumed."""
        task_id, index = split_episode(episode_id)
        group = self.groups.get(task_id)
        member = group.members[index] if group and index < len(group.members) else None
        if group is None or member is None or member.fence != fence or member.state not in ("leased", "queued"):
            raise LeaseLost(f"{episode_id}: fence {fence} is no longer the newest")
        if member.state == "queued" and member.lost_by:
            member.lost_by.pop()
        self.hold(member)
        return group, member

    def hold(self, member: GroupMember) -> None:
        member.state = "leased"
        member.expires_at = self.clock() + self.limits.lease_ttl_s

    def take_back_expired(self) -> None:
        now = self.clock()
        for group, index, member in sorted(self.leased(), key=lambda one: one[0].episode(one[1])):
            if member.expires_at <= now:
                member.lost_by.append(member.worker)
                member.state = "queued"
                self.counts["expired"] += group.is_train
                if len(member.lost_by) >= self.limits.max_lost_leases:
                    self.counts["killed_workers"] += 1
                    workers = f"{len(member.lost_by)} workers died or fell silent while they ran it: "
                    cause = workers + ", ".join(member.lost_by)
                    self.give_up(group, index, Outcome(OutcomeKind.INFRA_ERROR, cause, "worker"))

    def holds(self, worker: str) -> tuple[int, float]:
        """Episodes that a worker holds, and the most that it may hold in addition to those that lost leases."""
        members = [member for _, _, member in self.leased() if member.worker == worker]
        return len(members), min((most_together(len(member.lost_by)) for member in members), default=math.inf)

    def is_emptiest(self, worker: str) -> bool:
        """Returns True if no worker holds fewer episodes. Ties are broken by name."""
        counts = Counter(member.worker for _, _, member in self.leased())
        return min(counts, key=lambda name: (counts[name], name)) == worker

    def give_up(self, group: MemoryGroup, index: int, outcome: Outcome) -> None:
        """The episode becomes a dead letter; its journal moves there."""
        member = group.members[index]
        letter = DeadLetter(group.episode(index), outcome, member.attempts, [entry for entry, _ in member.journal])
        self.put_letter(letter, [size for _, size in member.journal])
        member.state, member.outcome, member.journal = "failed", outcome, []
        self.counts["failed"] += group.is_train
        if group.is_train:
            self.book_fate(Fate.DEAD_LETTER, [(group.episode(index), member)])
        self.count_ended(group)

    def count_ended(self, group: MemoryGroup) -> None:
        """Follows the end of each member. Once all that have started have ended, no other can become a branch."""
        reserved = [member for member in group.members if member.state == "reserved"]
        if any(not member.has_ended for member in group.members if member.state != "reserved"):
            return
        for member in reserved:
            member.state = "queued"
        if not reserved:
            self.end_group(group)

    def fork(self, group: MemoryGroup, origin: Origin, journal: list[tuple[JournalEntry, int]], count: int) -> None:
        """Members that wait become branches, each with this journal."""
        for member in [one for one in group.members if one.state == "reserved"][:count]:
            member.state, member.origin, member.journal, member.tokens = "queued", origin, list(journal), origin.sampled

    def end_group(self, group: MemoryGroup) -> None:
        """All members have ended: the group is ready for the trainer, filtered, dead, or done (other splits)."""
        if not group.is_train:
            self.change(group, "done")
            return
        rewards = group.rewards
        if not enough_members(len(rewards), len(group.members), self.limits.min_group):
            self._fail_group(group)
        elif self.limits.filter_groups == "zero_variance" and same_reward(min(rewards), max(rewards)):
            self._filter(group)
        else:
            unrewarded = [
                (name, one) for name, one in group.named_members() if one.payload is not None and not one.rewarded
            ]
            for _, member in unrewarded:
                member.payload = None
            self.counts["unrewarded"] += len(unrewarded)
            self.book_fate(Fate.UNREWARDED, unrewarded)
            lowest = group.floor if group.lowest_version is None else group.lowest_version
            group.due = lowest + self.limits.max_staleness
            self.change(group, "ready")

    def _filter(self, group: MemoryGroup) -> None:
        self.counts["filtered_groups"] += 1
        completed = [(name, member) for name, member in group.named_members() if member.state == "done"]
        self.counts["filtered"] += len(completed)
        self.book_fate(Fate.FILTERED, completed)
        self.filtered_since += 1
        del self.groups[group.task.task_id]

    def _fail_group(self, group: MemoryGroup) -> None:
        self.change(group, "dead")
        self.book_fate(
            Fate.DEAD_LETTER, [(name, one) for name, one in group.named_members() if one.payload is not None]
        )
        for index, member in enumerate(group.members):
            if member.payload is not None:
                member.payload = None
                self.counts["group_failed"] += 1
                if not member.rewarded and member.outcome is not None:
                    self.put_letter(DeadLetter(group.episode(index), member.outcome, member.attempts, []), [])

    def put_letter(self, letter: DeadLetter, sizes: list[int]) -> None:
        """`sizes`: accounted bytes of its journal entries."""
        self.letters[letter.episode_id] = letter
        self.letter_bytes[letter.episode_id] = sizes
        # Dead letters beyond the newest hundred keep their cause and lose their journal.
        for name in list(self.letters)[:-100]:
            self.letters[name] = replace(self.letters[name], journal=[])
            self.letter_bytes[name] = []

    def drop_letter(self, episode_id: str) -> None:
        self.letters.pop(episode_id, None)
        self.letter_bytes.pop(episode_id, None)

    def revive(self, group: MemoryGroup) -> None:
        """Queue a dead group again as it was submitted, in its old position."""
        group.members = [GroupMember() for _ in group.members]
        self.change(group, "queued" if group.is_train else "split")

    def drop_over_age(self, step: int) -> None:
        for group in self.in_state("admitted", "ready"):
            if group.due < step:
                self._drop(group)

    def _drop(self, group: MemoryGroup) -> None:
        """Unfinished members count with the tokens journaled so far."""
        self.counts["dropped_over_age"] += 1
        remaining = [(n, one) for n, one in group.named_members() if one.payload is not None or not one.has_ended]
        self.book_fate(Fate.OVER_AGE, remaining)
        for member in group.members:
            # Those without a reward were counted when their group was ready.
            self.counts["dropped"] += member.payload is not None
            self.lengths[bucket_of(member.tokens)] += not member.has_ended
            self.over_age_lengths[bucket_of(member.tokens)] += member.state != "failed"
        del self.groups[group.task.task_id]

    def keeps_enough(self, group: MemoryGroup, gone: set[str]) -> bool:
        """Returns True if a group of a fixed step can be trained without the episodes that are gone."""
        before = group.rewarded_episodes()
        remaining = sum(name not in gone for name in before)
        return remaining == len(before) or enough_members(remaining, len(group.members), self.limits.min_group)

    def ship(self, group: MemoryGroup, step: int) -> None:
        for member in group.members:
            lowest = step if member.lowest_version is None else member.lowest_version
            if member.rewarded and lowest + self.limits.max_staleness < step:
                self.counts["masked"] += 1
                self.over_age_lengths[bucket_of(member.tokens)] += 1
        self.change(group, "shipped")
        group.step = step

    # admission -----------------------------------------------------------------------------------------------------
    def admit(self, version: int) -> MemoryGroup | None:
        """Admit the first queued group for a worker at `version`, if every condition allows it."""
        limits, groups = self.limits, len(self.unconsumed())
        room = room_allows(self.waiting_bytes(), limits.max_bytes, groups, limits.max_groups, limits.groups_per_step)
        due = min(version, self.version) + limits.max_staleness
        if not room or not may_admit(due, self._unshipped_dues(), self.next_step, limits.groups_per_step):
            return None
        for group in sorted(self.in_state("queued"), key=_queue_rank):
            source = group.task.data_source
            unshipped, quota = self._of_source(source, "admitted", "ready"), limits.quotas.get(source, math.inf)
            if group.task.min_version <= version and unshipped < quota:
                group.floor, group.due = due - limits.max_staleness, due
                for member in group.members[roots_of(len(group.members), limits.branches) :]:
                    member.state = "reserved"
                self.change(group, "admitted")
                return group
        return None

    def parked(self) -> int:
        """Queued groups beyond what the quota of their source has room for."""
        room = {
            source: max(0, quota - self._of_source(source, "admitted", "ready"))
            for source, quota in self.limits.quotas.items()
        }
        return sum(max(0, self._of_source(source, "queued") - free) for source, free in room.items())

    def _of_source(self, source: str, *states: str) -> int:
        return sum(group.task.data_source == source for group in self.in_state(*states))

    def _unshipped_dues(self) -> list[int]:
        """Under ``mask`` a running group that is late occupies no place: it ships whenever it ends."""
        late_before = self.next_step if self.limits.overage == "mask" else 0
        running = [group.due for group in self.in_state("admitted") if group.due >= late_before]
        return running + [group.due for group in self.in_state("ready")]


def _queue_rank(group: MemoryGroup) -> tuple[int, int]:
    return -group.task.priority, group.seq


def _due_rank(group: MemoryGroup) -> tuple[int, int]:
    return group.due, group.seq
