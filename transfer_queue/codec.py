"""Bytes on the wire and in Redis: packed little-endian arrays behind a versioned, checksummed header. Never pickle.

    "PSTK" │ u16 format │ u32 header length │ u64 xxh3-64 of what follows │ header (msgpack) │ arrays, one after the other

The header holds plain data and a table [name, dtype, shape, offset] of the arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.transfer_queue.ledger import BadPayload
from penstock.transfer_queue.trajectory import (
    JournalEntry,
    JournalKind,
    Outcome,
    OutcomeKind,
    Segment,
    Task,
    Trajectory,
)

FORMAT = 1
MAX_BYTES = 256 << 20
_MAGIC = b"PSTK"
_PREAMBLE = struct.Struct("<4sHIQ")
_DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}
_SEGMENT_ARRAYS = {
    "prompt_ids": "i4",
    "response_ids": "i4",
    "response_mask": "u1",
    "response_logprobs": "f4",
    "version_spans": "i4",
    "turn_starts": "i4",
}
_ENTRY_ARRAYS = {"ids": "i4", "logprobs": "f4", "version_spans": "i4"}

Arrays = Mapping[str, tuple[str, Any]]


def pack(plain: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Plain data and named arrays (dtype code, values) as one block of bytes."""
    table, parts, offset = [], [], 0
    for name, (code, values) in arrays.items():
        array = np.ascontiguousarray(values, dtype=_DTYPES[code])
        table.append([name, code, list(array.shape), offset])
        parts.append(array.tobytes())
        offset += array.nbytes
    header = msgpack.packb({"plain": plain, "arrays": table}, use_bin_type=True)
    body = b"".join([header, *parts])
    return _PREAMBLE.pack(_MAGIC, FORMAT, len(header), xxhash.xxh3_64_intdigest(body)) + body


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Inverse of `pack`. Raises `BadPayload` naming what is damaged."""
    if len(data) < _PREAMBLE.size:
        raise BadPayload(f"payload: {len(data)} bytes are fewer than a header")
    magic, version, header_len, checksum = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC:
        raise BadPayload(f"payload: starts with {magic!r}, not {_MAGIC!r}")
    if version != FORMAT:
        raise BadPayload(f"payload: format version {version}, this Penstock reads {FORMAT}")
    body = memoryview(data)[_PREAMBLE.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise BadPayload("payload: checksum does not match (truncated or damaged)")
    header = msgpack.unpackb(body[:header_len], raw=False, strict_map_key=False)
    arrays = {row[0]: _array(body[header_len:], row) for row in header["arrays"]}
    return header["plain"], arrays


def _array(body: memoryview, row: list[Any]) -> NDArray[Any]:
    name, code, shape, offset = row
    if code not in _DTYPES:
        raise BadPayload(f"{name}: unknown dtype {code!r}")
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(body, dtype=_DTYPES[code], count=count, offset=offset).reshape(shape)


# tasks ---------------------------------------------------------------------------------------------------------------
def pack_task(task: Task) -> bytes:
    """Plain msgpack: a task holds no arrays."""
    return msgpack.packb(asdict(task), use_bin_type=True)


def unpack_task(data: bytes) -> Task:
    return Task(**msgpack.unpackb(data, raw=False, strict_map_key=False))


# outcomes ------------------------------------------------------------------------------------------------------------
def plain_outcome(outcome: Outcome) -> dict[str, str]:
    return {"kind": outcome.kind.value, "reason": outcome.reason, "component": outcome.component}


def outcome_from(plain: Mapping[str, str]) -> Outcome:
    return Outcome(OutcomeKind(plain["kind"]), plain["reason"], plain["component"])


# trajectories --------------------------------------------------------------------------------------------------------
_TRAJECTORY_PLAIN = ("episode_id", "task_id", "reward", "num_turns", "data_source")


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """A 100k-token trajectory packs into about 1 MB."""
    plain = {name: getattr(trajectory, name) for name in _TRAJECTORY_PLAIN}
    plain |= {
        "outcome": plain_outcome(trajectory.outcome),
        "turn_rewards": list(trajectory.turn_rewards),
        "metrics": dict(trajectory.metrics),
        "extra": dict(trajectory.extra),
        "segments": len(trajectory.segments),
    }
    arrays = {
        f"{index}/{name}": (code, getattr(segment, name))
        for index, segment in enumerate(trajectory.segments)
        for name, code in _SEGMENT_ARRAYS.items()
    }
    return pack(plain, arrays)


def unpack_trajectory(data: bytes) -> Trajectory:
    """Raises `BadPayload`."""
    plain, arrays = unpack(data)
    segments = tuple(
        Segment(**{name: arrays[f"{index}/{name}"] for name in _SEGMENT_ARRAYS})
        for index in range(plain.pop("segments"))
    )
    outcome = outcome_from(plain.pop("outcome"))
    return Trajectory(segments=segments, outcome=outcome, **plain)


# journal entries -----------------------------------------------------------------------------------------------------
def pack_entry(entry: JournalEntry) -> bytes:
    plain = {
        "kind": entry.kind.value,
        "context_len": entry.context_len,
        "context_hash": entry.context_hash,
        "data": dict(entry.data),
    }
    present = {name: code for name, code in _ENTRY_ARRAYS.items() if getattr(entry, name) is not None}
    return pack(plain, {name: (code, getattr(entry, name)) for name, code in present.items()})


def unpack_entry(data: bytes) -> JournalEntry:
    """Raises `BadPayload`."""
    plain, arrays = unpack(data)
    return JournalEntry(kind=JournalKind(plain.pop("kind")), **plain, **arrays)


# what may enter the ledger -------------------------------------------------------------------------------------------
def check_trajectory(trajectory: Trajectory) -> None:
    """Invariant 1 at the door. Raises `BadPayload` naming segment and field."""
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        raise BadPayload(f"reward: {trajectory.reward} is not finite")
    if trajectory.reward is not None and not trajectory.outcome.may_carry_reward:
        raise BadPayload(f"reward: outcome {trajectory.outcome.kind.value} may not carry one")
    for index, segment in enumerate(trajectory.segments):
        problem = _segment_problem(segment)
        if problem:
            raise BadPayload(f"segments[{index}].{problem}")


def _segment_problem(segment: Segment) -> str | None:
    length = len(segment.response_ids)
    for name in ("response_mask", "response_logprobs"):
        if len(getattr(segment, name)) != length:
            return f"{name}: {len(getattr(segment, name))} values for {length} response_ids"
    if len(segment.prompt_ids) == 0:
        return "prompt_ids: empty"
    if min(segment.prompt_ids.min(), segment.response_ids.min(initial=0)) < 0:
        return "response_ids: a negative token id"
    if not np.isin(segment.response_mask, (0, 1)).all():
        return "response_mask: holds other values than 0 and 1"
    if not np.isfinite(segment.response_logprobs).all():
        return "response_logprobs: NaN or infinite"
    return _spans_problem(segment)


def _spans_problem(segment: Segment) -> str | None:
    spans, length = np.asarray(segment.version_spans), len(segment.response_ids)
    if spans.ndim != 2 or spans.shape[1] != 3:
        return f"version_spans: shape {spans.shape} is not [S, 3]"
    if len(spans) and (spans[:, 0].min() < 0 or spans[:, 1].min() < 0 or spans[:, 2].max() > length):
        return "version_spans: a negative version, or positions outside the response"
    covered = np.zeros(length, dtype=np.int64)
    for _, start, end in spans:
        covered[start:end] += 1
    if (covered[segment.response_mask == 1] != 1).any():
        return "version_spans: do not cover every sampled token exactly once"
    return None
