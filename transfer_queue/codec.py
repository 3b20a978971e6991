"""Trajectory, JournalEntry and Task ↔ bytes. See `packing` for the container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.transfer_queue.ledger import BadPayload
from penstock.transfer_queue.packing import Arrays, pack, pack_plain, unpack, unpack_plain
from penstock.transfer_queue.trajectory import (
    JournalEntry,
    JournalKind,
    Outcome,
    OutcomeKind,
    Segment,
    Task,
    Trajectory,
)

KIND_TRAJECTORY = 1
KIND_JOURNAL = 2

SEGMENT_DTYPES = {
    "prompt_ids": "i4",
    "response_ids": "i4",
    "response_mask": "u1",
    "response_logprobs": "f4",
    "version_spans": "i4",
    "turn_starts": "i4",
}
JOURNAL_DTYPES = {"ids": "i4", "logprobs": "f4", "version_spans": "i4"}


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Pack a trajectory. Fields of segment i are named ``i.prompt_ids`` and so on."""
    arrays = {
        f"{index}.{name}": (dtype, getattr(segment, name))
        for index, segment in enumerate(trajectory.segments)
        for name, dtype in SEGMENT_DTYPES.items()
    }
    plain = {
        "episode_id": trajectory.episode_id,
        "task_id": trajectory.task_id,
        "segments": len(trajectory.segments),
        "reward": trajectory.reward,
        "outcome": outcome_to_plain(trajectory.outcome),
        "turn_rewards": list(trajectory.turn_rewards),
        "num_turns": trajectory.num_turns,
        "metrics": dict(trajectory.metrics),
        "extra": dict(trajectory.extra),
        "data_source": trajectory.data_source,
    }
    return pack(KIND_TRAJECTORY, arrays, plain)


def decode_trajectory(blob: bytes) -> Trajectory:
    """The trajectory, its arrays read-only. Raises `BadPayload` naming the damaged field."""
    arrays, plain = unpack(blob, KIND_TRAJECTORY)
    try:
        segments = [_segment(arrays, index) for index in range(plain.pop("segments"))]
        return Trajectory(segments=segments, outcome=outcome_from_plain(plain.pop("outcome")), **plain)
    except (KeyError, TypeError) as error:
        raise BadPayload(f"head: field {error} is missing or unknown") from error


def encode_journal(entry: JournalEntry) -> bytes:
    arrays = {
        name: (dtype, getattr(entry, name))
        for name, dtype in JOURNAL_DTYPES.items()
        if getattr(entry, name) is not None
    }
    plain = {
        "kind": str(entry.kind),
        "context_len": entry.context_len,
        "context_hash": entry.context_hash,
        "data": dict(entry.data),
    }
    return pack(KIND_JOURNAL, arrays, plain)


def decode_journal(blob: bytes) -> JournalEntry:
    arrays, plain = unpack(blob, KIND_JOURNAL)
    try:
        return JournalEntry(**{**plain, **arrays, "kind": JournalKind(plain["kind"])})
    except (KeyError, TypeError, ValueError) as error:
        raise BadPayload(f"head: {error}") from error


def encode_task(task: Task) -> bytes:
    """msgpack of the task's fields by name. Raises `BadPayload` naming task and field of what is not plain data."""
    packed = {}
    for name in (one.name for one in fields(Task)):
        pack_plain(getattr(task, name), f"task {task.task_id}: {name}")
        packed[name] = _mutable(getattr(task, name))
    return pack_plain(packed, f"task {task.task_id}")


def decode_task(blob: bytes) -> Task:
    return Task(**unpack_plain(blob, "task"))


def outcome_to_plain(outcome: Outcome) -> list[str]:
    return [str(outcome.kind), outcome.reason, outcome.component]


def outcome_from_plain(plain: list[str]) -> Outcome:
    kind, reason, component = plain
    return Outcome(OutcomeKind(kind), reason, component)


def _segment(arrays: Arrays, index: int) -> Segment:
    return Segment(**{name: arrays[f"{index}.{name}"] for name in SEGMENT_DTYPES})


def _mutable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


from penstock.transfer_queue.trajectory import FieldValues
from penstock.transfer_queue.ledger import LedgerError


def get_fields(blob, fields, start=0, stop=None):
    t = decode_trajectory(blob)
    plain = {}
    segs = [{} for _ in t.segments]
    for f in fields:
        if f in SEGMENT_DTYPES:
            for s, o in zip(t.segments, segs):
                v = getattr(s, f)
                o[f] = v[start:stop] if f in ("response_ids", "response_mask", "response_logprobs") else v
        elif hasattr(t, f):
            plain[f] = getattr(t, f)
        else:
            raise LedgerError(f"{f}: no such field; response_mask")
    return FieldValues(t.episode_id, plain, segs)


def wanted_fields(h, f):
    return []


def values_of(*a):
    raise NotImplementedError
