"""What Lua scripts return ↔ the ledger's types."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from penstock.transfer_queue.codec import decode_journal, decode_task, outcome_from_plain
from penstock.transfer_queue.ledger import Announcement, DeadLetter, Lease, LedgerError, Limits, Status
from penstock.transfer_queue.packing import pack_plain, unpack_plain
from penstock.transfer_queue.trajectory import JournalEntry

_POSITION = struct.Struct(">I")
EVER = ("completed", "failed", "retried", "expired", "trained", "committed", "dropped")


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
    """Name, value, … as the run's hash holds them. Raises `LedgerError` for limits that no run can work with."""
    for name in ("group_size", "groups_per_step", "min_group", "max_attempts", "lease_ttl_s", "max_bytes"):
        if getattr(limits, name) <= 0:
            raise LedgerError(f"limits: {name} is {getattr(limits, name)}, it must be above 0")
    if limits.max_staleness < 0 or limits.overage not in ("wait", "mask", "drop"):
        raise LedgerError(f"limits: max_staleness {limits.max_staleness}, overage {limits.overage!r}")
    values = {one.name: getattr(limits, one.name) for one in fields(Limits)}
    values["lease_ttl_ms"] = round(values.pop("lease_ttl_s") * 1000)
    return [item for pair in values.items() for item in pair]


def status_from_map(found: dict[str, Any]) -> Status:
    """From the packed map of ``status.lua``."""
    version, step, committed, held, per_step, group_size = (int(value or 0) for value in found["run"])
    counts = {name: int(value) for name, value in _pairs(found["counts"])}
    published = max(version, committed)
    groups = {
        "queued": found["queued"],
        "admitted": found["admitted"],
        "ready": found["ready"],
        "shipped": (step - published) * per_step,
        "trained": (published - committed) * per_step,
        "committed": counts.get("committed_groups", 0),
        "dropped_over_age": counts.get("dropped_over_age", 0),
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
        bytes=held,
        waits_s={name: float(value) for name, value in _pairs(found["waits"])},
        workers={name: int(value) for name, value in _pairs(found["workers"])},
        other_lanes=_lanes(found["lanes"]),
    )


def _lanes(flat: Sequence[str]) -> dict[str, dict[str, int]]:
    lanes: dict[str, dict[str, int]] = {}
    for name, value in _pairs(flat):
        lane, _, state = name.rpartition(" ")
        lanes.setdefault(lane, {"queued": 0, "leased": 0, "done": 0})[state] = int(value)
    return lanes


def _pairs(flat: Sequence[str]) -> list[tuple[str, str]]:
    """Lua's empty table arrives as an empty list or map; both have no pairs."""
    items = list(flat)
    return list(zip(items[::2], items[1::2], strict=True))
