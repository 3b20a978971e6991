"""The state of a run in numbers, and what it says of evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LengthDecile:
    """One tenth of all finished training episodes by response length, and its number of over-age episodes.

    Over-age shares that grow with length mean that the bound discards long episodes, which biases training.
    """

    tokens_up_to: int
    """Longest response of the decile, in tokens (mask 0 and 1), to within a twelfth."""
    episodes: int
    over_age: int
    """Number of them that were dropped or masked because they exceeded the staleness bound."""


EPISODE_TOTALS = (
    *("completed", "failed", "retried", "expired", "trained", "committed", "masked", "spilled"),
    *("dropped", "filtered", "unrewarded", "group_failed", "payload_lost"),
    "killed_workers",
)
"""Keys of `Status.episodes` that count what ever happened."""


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run, read in one round trip. Counts are of split ``train``."""

    version: int
    step: int
    """Next step to be leased."""
    committed_step: int
    """Steps below this are in a durable checkpoint."""
    groups: Mapping[str, int]
    """queued, admitted, ready, shipped, trained, committed, dropped_over_age, filtered, dead, payload_lost,
    submitted"""
    episodes: Mapping[str, int]
    """queued, leased; and ever: completed (acknowledged), failed (given up), retried, expired (leases lost), trained
    (in published steps), committed, masked (trained although over-age, with their old tokens masked), spilled; and
    finished ones that will not be trained, by reason: dropped (over-age), filtered (rewards all equal), unrewarded (its
    group continued without it), group_failed (its group died), payload_lost (its step was fixed
    and its payload gone). completed = committed + held + these five. And killed_workers: given up because their workers
    died, of all splits."""
    bytes: int
    """Bytes of the run in the store: tasks, journals, payloads and bookkeeping; within 10 % of Redis's figure."""
    waits_s: Mapping[str, float]
    """``role:cause`` → seconds."""
    workers: Mapping[str, int]
    """worker → number of leased episodes."""
    other_splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """split → {queued, leased, done}"""
    ages_s: Mapping[str, float] = field(default_factory=dict)
    """queued, admitted, ready → time in that state of the first group there; absent if there is none."""
    over_age: Sequence[LengthDecile] = ()
    """Ten deciles, shortest first; empty until an episode has finished."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """`Outcome.failure` → attempts at episodes that ended so, retried ones included."""
    parked: int = 0
    """Queued groups over the quota of their source; also counted in queued."""
    unconsumed_bytes: int = 0
    """Payloads and journals that count against `max_bytes`."""


_PREFIX = "eval/"


def evaluation_split(version: int) -> str:
    return f"{_PREFIX}{version}"


def under_evaluation(status: Status, version: int) -> bool:
    """Returns True if evaluation episodes that a server at `version` may sample are queued or running.

    An evaluation of a newer version does not count: it waits until a server has that version.
    """
    busy = (split for split, counts in status.other_splits.items() if counts.get("queued", 0) + counts.get("leased", 0))
    numbers = [split.removeprefix(_PREFIX) if split.startswith(_PREFIX) else "" for split in busy]
    return any(not number.isdecimal() or int(number) <= version for number in numbers)
