"""Groups of an in-memory queue and their members, as `memory_state.MemoryState` holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.transfer_queue.metrics import payload_cost
from penstock.transfer_queue.types import JournalEntry, Origin, Outcome, Task

TRAIN = "train"


@dataclass(slots=True)
class GroupMember:
    """One episode of a group. `state`: queued, leased, done (trajectory acknowledged), failed (given up), or reserved
    while it waits to be a branch."""

    state: str = "queued"
    fence: int | None = None
    """The newest, of a lease or of its end; None before the first lease."""
    failed_fence: int | None = None
    """Fence of the lease whose `fail` was counted last; a repeat of that call is a no-op."""
    worker: str = ""
    attempts: int = 0
    lost_by: list[str] = field(default_factory=list)
    """Workers that died while they ran it; a lease that is taken up again was not lost."""
    expires_at: float = 0.0
    journal: list[tuple[JournalEntry, int]] = field(default_factory=list)
    """Entries and what they count for in bytes."""
    payload: bytes | None = None
    spilled: bool = False
    reward: float | None = None
    lowest_version: int | None = None
    tokens: int = 0
    """Length of the response; before the end, tokens journaled so far."""
    sampled: int = 0
    """Tokens of its trajectory that were sampled."""
    outcome: Outcome | None = None
    origin: Origin | None = None
    """None: it is a root."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def rewarded(self) -> bool:
        return self.reward is not None

    @property
    def held_bytes(self) -> int:
        payload = 0 if self.payload is None else payload_cost(len(self.payload))
        return payload + sum(size for _, size in self.journal)


@dataclass(slots=True)
class MemoryGroup:
    """All episodes of one task. `state`: queued, admitted, ready, shipped, dead; done for other splits."""

    task: Task
    seq: int
    members: list[GroupMember]
    cost: int
    """Bytes of the task and its bookkeeping."""
    members_cost: int
    """Bytes of the episodes' bookkeeping, once they may run."""
    since: float
    """When it came to be in its state."""
    state: str = "queued"
    floor: int = 0
    due: int = 0
    step: int = -1

    @property
    def is_train(self) -> bool:
        return self.task.split == TRAIN

    @property
    def ended(self) -> bool:
        return all(member.has_ended for member in self.members)

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members if member.reward is not None]

    @property
    def lowest_version(self) -> int | None:
        versions = [m.lowest_version for m in self.members if m.rewarded and m.lowest_version is not None]
        return min(versions, default=None)

    def named_members(self) -> list[tuple[str, GroupMember]]:
        """(episode, member) of each."""
        return [(self.episode(index), member) for index, member in enumerate(self.members)]

    def episode(self, index: int) -> str:
        return f"{self.task.task_id}#{index}"

    def rewarded_episodes(self) -> list[str]:
        return [self.episode(index) for index, member in enumerate(self.members) if member.rewarded]


def split_episode(episode_id: str) -> tuple[str, int]:
    """``train/7#3`` → (``train/7``, 3); an invalid id maps to a task that does not exist."""
    task_id, _, index = episode_id.rpartition("#")
    return (task_id, int(index)) if index.isdecimal() else ("", 0)
