"""The state of an in-memory ledger and its transitions; `memory.MemoryLedger` gives it the protocol's face.

What one Lua script does at once is done here between two awaits, so nothing interleaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.transfer_queue.arithmetic import bytes_allow, enough_members, may_admit
from penstock.transfer_queue.ledger import Announcement, DeadLetter, LeaseLost, Limits
from penstock.transfer_queue.trajectory import JournalEntry, Outcome, Task

TRAIN = "train"
DEFAULT_LIMITS = Limits(group_size=1, groups_per_step=1, max_staleness=0)


@dataclass(slots=True)
class Member:
    """One episode of a group. `state`: queued, leased, done (trajectory acknowledged) or failed (given up)."""

    state: str = "queued"
    fence: int = 0
    failed_fence: int = 0
    """Fence of the lease whose `fail` was counted last; a repeat of that call is a no-op."""
    worker: str = ""
    attempts: int = 0
    expires_at: float = 0.0
    journal: list[tuple[JournalEntry, int]] = field(default_factory=list)
    """Entries and their packed sizes in bytes."""
    payload: bytes | None = None
    rewarded: bool = False
    outcome: Outcome | None = None

    @property
    def held_bytes(self) -> int:
        return sum(size for _, size in self.journal) + len(self.payload or b"")


@dataclass(slots=True)
class Group:
    """All episodes of one task. `state`: queued, admitted, ready, shipped, dead; done for other lanes."""

    task: Task
    seq: int
    members: list[Member]
    state: str = "queued"
    floor: int = 0
    due: int = 0
    step: int = -1
    lowest_version: int | None = None

    @property
    def is_train(self) -> bool:
        return self.task.lane == TRAIN

    @property
    def ended(self) -> bool:
        return all(member.state in ("done", "failed") for member in self.members)

    def episode(self, index: int) -> str:
        return f"{self.task.task_id}#{index}"

    def rewarded_episodes(self) -> list[str]:
        return [self.episode(index) for index, member in enumerate(self.members) if member.rewarded]


def split_episode(episode_id: str) -> tuple[str, int]:
    """``train/7#3`` → (``train/7``, 3)."""
    task_id, _, index = episode_id.rpartition("#")
    return task_id, int(index)


class MemoryState:
    """Groups, batches and counters of one run."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.limits = DEFAULT_LIMITS
        self.groups: dict[str, Group] = {}
        self.batches: dict[int, list[str]] = {}
        """Step → group ids, for fixed and uncommitted steps."""
        self.version = 0
        self.next_step = 0
        self.committed_step = 0
        self.cursor = 0
        self.announcement: Announcement | None = None
        self.counts: Counter[str] = Counter()
        self.letters: dict[str, DeadLetter] = {}
        self._seq = 0
        self._fence = 0

    # reading -------------------------------------------------------------------------------------------------------
    def in_state(self, *states: str) -> list[Group]:
        """Groups of lane train in one of `states`, oldest first."""
        found = [group for group in self.groups.values() if group.is_train and group.state in states]
        return sorted(found, key=lambda group: group.seq)

    def leased(self) -> Iterator[tuple[Group, int, Member]]:
        for group in self.groups.values():
            for index, member in enumerate(group.members):
                if member.state == "leased":
                    yield group, index, member

    def open_episodes(self, train: bool, version: int) -> list[tuple[Group, int]]:
        """Episodes that a worker at `version` may take at once: lowest floor first, then oldest group."""
        found = [
            (group.floor, group.seq, group.episode(index), group, index)
            for group in self.groups.values()
            if group.is_train == train and group.state in ("admitted", "lane") and group.floor <= version
            for index, member in enumerate(group.members)
            if member.state == "queued"
        ]
        return [(group, index) for *_, group, index in sorted(found, key=lambda row: row[:3])]

    def held_bytes(self, groups: Iterable[Group]) -> int:
        return sum(member.held_bytes for group in groups for member in group.members)

    def unconsumed(self) -> list[Group]:
        """Groups in the system whose step is not published yet."""
        shipped = [group for group in self.in_state("shipped") if group.step >= self.version]
        return self.in_state("admitted", "ready") + shipped

    # episodes ------------------------------------------------------------------------------------------------------
    def add_group(self, task: Task) -> None:
        size = self.limits.group_size if task.lane == TRAIN else 1
        group = Group(task, self._seq, [Member() for _ in range(size)])
        if not group.is_train:
            group.state, group.floor = "lane", task.min_version
        self._seq += 1
        self.groups[task.task_id] = group

    def new_fence(self) -> int:
        self._fence += 1
        return self._fence

    def owned(self, episode_id: str, fence: int) -> tuple[Group, Member]:
        """The member that `fence` still owns. A lease that ran out and was not given on is taken up again."""
        task_id, index = split_episode(episode_id)
        group = self.groups.get(task_id)
        member = group.members[index] if group and index < len(group.members) else None
        if group is None or member is None or member.fence != fence or member.state not in ("leased", "queued"):
            raise LeaseLost(f"{episode_id}: fence {fence} is no longer the newest")
        self.hold(member)
        return group, member

    def hold(self, member: Member) -> None:
        member.state = "leased"
        member.expires_at = self.clock() + self.limits.lease_ttl_s

    def take_back_expired(self) -> None:
        now = self.clock()
        for group, _, member in list(self.leased()):
            if member.expires_at <= now:
                member.state = "queued"
                self.counts["expired"] += group.is_train

    def end_group(self, group: Group) -> None:
        """All members have ended: the group is ready for the trainer, dead, or done (other lanes)."""
        if not group.is_train:
            group.state = "done"
            return
        for member in group.members:
            if not member.rewarded:
                member.payload = None
        rewarded = len(group.rewarded_episodes())
        if not enough_members(rewarded, len(group.members), self.limits.min_group):
            self._bury(group)
            return
        lowest = group.floor if group.lowest_version is None else group.lowest_version
        group.state, group.due = "ready", lowest + self.limits.max_staleness

    def _bury(self, group: Group) -> None:
        group.state = "dead"
        for index, member in enumerate(group.members):
            member.payload = None
            if member.state == "done" and not member.rewarded and member.outcome is not None:
                self.letters[group.episode(index)] = DeadLetter(
                    group.episode(index), member.outcome, member.attempts, []
                )

    def revive(self, group: Group) -> None:
        """Queue a dead group again as it was submitted, at its old place in the order."""
        group.members = [Member() for _ in group.members]
        group.state = "queued" if group.is_train else "lane"
        group.lowest_version = None

    def drop_over_age(self, step: int) -> None:
        for group in self.in_state("admitted", "ready"):
            if group.due < step:
                self.counts["dropped_over_age"] += 1
                self.counts["dropped"] += len(group.members)
                del self.groups[group.task.task_id]

    # admission -----------------------------------------------------------------------------------------------------
    def admit(self, version: int) -> Group | None:
        """Admit the oldest queued group for a worker at `version`, if both gates are open."""
        system = self.unconsumed()
        gate = bytes_allow(self.held_bytes(system), self.limits.max_bytes, len(system), self.limits.groups_per_step)
        due = min(version, self.version) + self.limits.max_staleness
        if not gate or not may_admit(due, self._unshipped_dues(), self.next_step, self.limits.groups_per_step):
            return None
        for group in self.in_state("queued"):
            if group.task.min_version <= version:
                group.state, group.floor, group.due = "admitted", due - self.limits.max_staleness, due
                return group
        return None

    def _unshipped_dues(self) -> list[int]:
        """Under ``mask`` a group that is late while it runs takes nobody's place: it ships whenever it ends."""
        late_before = self.next_step if self.limits.overage == "mask" else 0
        running = [group.due for group in self.in_state("admitted") if group.due >= late_before]
        return running + [group.due for group in self.in_state("ready")]
