"""What Lua scripts return ↔ the queue's types."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from penstock.transfer_queue.codec import decode_journal, decode_task, outcome_from_plain
from penstock.transfer_queue.lengths import deciles
from penstock.transfer_queue.packing import pack_plain, unpack_plain
from penstock.transfer_queue.queue import Announcement, DeadLetter, Lease, Limits, QueueError, Status
from penstock.transfer_queue.trajectory import JournalEntry

_POSITION = struct.Struct(">I")
OVERAGE = ("wait", "mask", "drop")
FILTERS = ("none", "zero_variance")
EVER = (
    *("completed", "failed", "retried", "expired", "trained", "committed", "masked", "spilled"),
    *("dropped", "filtered", "unrewarded", "group_failed"),
)


def lease_from_row(row: Sequence[Any]) -> Lease:
    """From {episode, member, attempts, fence, floor, task, journal}."""
    episode, member, attempts, fence, floor, task, journal = row
    return Lease(episode.decode(), decode_task(task), member, attempts, fence, floor, journal_from_values(journal))


def letter_from_row(row: Sequence[Any]) -> DeadLetter:
    """From {episode, outcome, attempts, journal}."""
    episode, outcome, attempts, journal = row
    ending = outcome_from_plain(unpack_plain(outcome, "outcome"))
    return DeadLetter(episode.decode(), ending, attempts, journal_from_values(journal))


def journal_from_values(values: Sequence[bytes]) -> list[JournalEntry]:
    """Entries in the order they were appended: each value starts with its position, big-endian, so bytes sort so."""
    return [decode_journal(value[_POSITION.size :]) for value in sorted(values)]


def pack_announcement(announcement: Announcement) -> bytes:
    return pack_plain([announcement.version, dict(announcement.manifest)], "manifest")


def unpack_announcement(blob: bytes) -> Announcement:
    version, manifest = unpack_plain(blob, "announcement")
    return Announcement(version, manifest)


def pack_record(record: Any) -> bytes:
    """A flat dataclass (ServerInfo, WeightUpdate) as a msgpack map."""
    return pack_plain(asdict(record), type(record).__name__)


def limits_to_args(limits: Limits) -> list[Any]:
    """Name, value, … as the run's hash holds them. Raises `QueueError` for limits that no run can work with."""
    check_limits(limits)
    values = {one.name: getattr(limits, one.name) for one in fields(Limits)}
    values["lease_ttl_ms"] = round(values.pop("lease_ttl_s") * 1000)
    values["quotas"] = json.dumps(dict(limits.quotas), sort_keys=True)
    return [item for pair in values.items() for item in pair]


def check_limits(limits: Limits) -> None:
    """Raise `QueueError` naming the limit, and the arithmetic where one could never be met."""
    least: dict[str, float] = dict.fromkeys(
        ("group_size", "groups_per_step", "min_group", "max_attempts", "max_bytes"), 1
    )
    least |= dict.fromkeys(("max_staleness", "max_groups", "max_filtered_steps"), 0) | {"lease_ttl_s": 0.001}
    numbers = {name: (getattr(limits, name), low) for name, low in least.items()}
    numbers |= {f"quota of {source!r}": (quota, 1) for source, quota in limits.quotas.items()}
    for name, (value, low) in numbers.items():
        if value < low:
            raise QueueError(f"limits: {name} is {value}, it must be at least {low}")
    for name, choices in (("overage", OVERAGE), ("filter_groups", FILTERS)):
        if getattr(limits, name) not in choices:
            raise QueueError(f"limits: {name} is {getattr(limits, name)!r}; one of {', '.join(choices)}")
    if 0 < limits.max_groups < limits.groups_per_step:
        raise QueueError(
            f"limits: max_groups = {limits.max_groups} < groups_per_step = {limits.groups_per_step}: a step could never"
            f" be filled; give at least {limits.groups_per_step}, or 0 for no limit"
        )
    if limits.filter_groups == "zero_variance" and limits.group_size < 2:
        raise QueueError("limits: filter_groups = zero_variance with group_size = 1 would filter every group")


def status_from_map(found: dict[str, Any]) -> Status:
    """From the packed map of ``status.lua``."""
    version, step, committed, per_step, group_size = found["run"]
    counts, counters = _ints(found["counts"]), _ints(found["counters"])
    published = max(version, committed)
    groups = {
        "queued": found["queued"],
        "admitted": found["admitted"],
        "ready": found["ready"],
        "shipped": (step - published) * per_step,
        "trained": (published - committed) * per_step,
        "committed": counts.get("committed_groups", 0),
        "dropped_over_age": counts.get("dropped_over_age", 0),
        "filtered": counts.get("filtered_groups", 0),
        "dead": counts.get("dead_groups", 0),
        "submitted": counts.get("submitted", 0),
    }
    now = {"queued": found["queued"] * group_size + found["open"], "leased": counts.get("leased", 0)}
    return Status(
        version=version,
        step=step,
        committed_step=committed,
        groups=groups,
        episodes=now | {name: counts.get(name, 0) for name in EVER},
        bytes=counters.get("bytes", 0),
        parked=found["parked"],
        unconsumed_bytes=counters.get("unconsumed", 0),
        waits_s={name: float(value) for name, value in _pairs(found["waits"])},
        workers=_ints(found["workers"]),
        other_splits=_splits(found["splits"]),
        ages_s={name: ms / 1000 for name, ms in found["ages"].items() if ms >= 0},
        over_age=deciles(_buckets(found["lengths"], "all"), _buckets(found["lengths"], "over")),
    )


def _splits(flat: Sequence[str]) -> dict[str, dict[str, int]]:
    splits: dict[str, dict[str, int]] = {}
    for name, value in _pairs(flat):
        split, _, state = name.rpartition(" ")
        splits.setdefault(split, {"queued": 0, "leased": 0, "done": 0})[state] = int(value)
    return splits


def _buckets(flat: Sequence[str], kind: str) -> dict[int, int]:
    found = [(name.partition(" "), int(value)) for name, value in _pairs(flat)]
    return {int(bucket): count for (which, _, bucket), count in found if which == kind}


def _ints(flat: Sequence[str]) -> dict[str, int]:
    return {name: int(value) for name, value in _pairs(flat)}


def _pairs(flat: Sequence[str]) -> list[tuple[str, str]]:
    """Lua's empty table arrives as an empty list or map; both have no pairs."""
    items = list(flat)
    return list(zip(items[::2], items[1::2], strict=True))
