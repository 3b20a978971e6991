"""Encodes and decodes `Trajectory`, `JournalEntry`, `Task` and `Announcement`. See `packing` for the container."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue.codec.columns import DTYPES
from penstock.transfer_queue.codec.packing import (
    Column,
    Packed,
    PayloadHead,
    pack,
    pack_plain,
    read_arrays,
    unpack_plain,
    whole_head,
)
from penstock.transfer_queue.errors import BadPayload, QueueError
from penstock.transfer_queue.types import (
    Announcement,
    AnnouncementMark,
    EpisodeImages,
    FieldValues,
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
SEGMENT_FIELDS = tuple(SEGMENT_DTYPES)
OPTIONAL_DTYPES = {
    "teacher_logprobs": "f4",
    "routed_experts": "u1|u2",
    "teacher_top_ids": "i4",
    "teacher_top_logprobs": "f4",
}
"""Fields that a segment may lack: None in `Segment`, no column in the payload, no entry in `FieldValues`. ``u1|u2``:
one of these dtypes, the array's own."""
OPTIONAL_FIELDS = tuple(OPTIONAL_DTYPES)
TOKEN_FIELDS = ("response_ids", "response_mask", "response_logprobs", "teacher_logprobs")
"""Fields with one value per response token, checked block by block."""
IMAGES = "images"
"""Field of the encoded images, end to end, and in the head's plain data which they are: [digest, bytes] of each, names
by segment, URLs of those that are elsewhere. Neither is there where a trajectory has none."""
PLAIN_FIELDS = tuple(one.name for one in dataclass_fields(Trajectory) if one.name not in ("segments", IMAGES))
JOURNAL_DTYPES = {"ids": "i4", "logprobs": "f4", "version_spans": "i4", "routed_experts": "u1|u2"}
_TASK_FIELDS = tuple(one.name for one in dataclass_fields(Task))
_ALL_DTYPES = {**SEGMENT_DTYPES, **OPTIONAL_DTYPES}
_OPTIONAL_ENDS = tuple(f".{name}" for name in OPTIONAL_FIELDS)
_COLUMNS = [(name, dtype, name in TOKEN_FIELDS) for name, dtype in _ALL_DTYPES.items()]


def encode_trajectory(trajectory: Trajectory, compression: str = "none") -> bytes:
    """`pack_trajectory` as one bytes object."""
    return pack_trajectory(trajectory, compression).joined()


def pack_trajectory(trajectory: Trajectory, compression: str = "none") -> Packed:
    """Pack a trajectory. Fields of segment i are named ``i.prompt_ids`` and so on.

    Raises `BadPayload` naming what cannot be packed, `QueueError` for an unavailable compression.
    """
    columns = [
        Column(f"{index}.{name}", _dtype_of(getattr(segment, name), dtype), getattr(segment, name), sliced)
        for index, segment in enumerate(trajectory.segments)
        for name, dtype, sliced in _COLUMNS
        if name in SEGMENT_DTYPES or getattr(segment, name) is not None
    ]
    plain = {name: getattr(trajectory, name) for name in PLAIN_FIELDS}
    plain["outcome"] = outcome_to_plain(trajectory.outcome)
    plain["segments"] = len(trajectory.segments)
    if trajectory.images is not None:
        columns.append(Column(IMAGES, "u1", np.frombuffer(b"".join(trajectory.images.data.values()), np.uint8)))
        plain[IMAGES] = _images_to_plain(trajectory.images)
    return pack(KIND_TRAJECTORY, columns, plain, compression)


def decode_trajectory(blob: bytes) -> Trajectory:
    """The trajectory, its arrays read-only. Raises `BadPayload` naming the damaged field."""
    head = whole_head(blob, KIND_TRAJECTORY)
    count = _count(head)
    arrays = read_arrays(head, blob)
    segments = [
        Segment(**{name: arrays[f"{index}.{name}"] for name in _ALL_DTYPES if f"{index}.{name}" in arrays})
        for index in range(count)
    ]
    images = _images_from_plain(head.plain.get(IMAGES), arrays.get(IMAGES))
    return Trajectory(segments=segments, images=images, **_plain_values(head, PLAIN_FIELDS))


def wanted_fields(head: PayloadHead, fields: Sequence[str]) -> list[str]:
    """Names in the head's table that `fields` (of `Segment` and `Trajectory`) need, segment by segment.

    Raises `QueueError` for an unknown field, `BadPayload` for a head of another kind.
    """
    names = _segment_fields(fields)
    candidates = (f"{index}.{name}" for index in range(_count(head)) for name in names)
    return [name for name in candidates if name in head.fields]


def values_of(head: PayloadHead, raws: Mapping[str, Any], fields: Sequence[str]) -> FieldValues:
    """`fields` from the bytes of each of `wanted_fields`. Raises `BadPayload`, `QueueError`."""
    segments = [
        {
            name: head.fields[f"{index}.{name}"].decode(raws[f"{index}.{name}"])
            for name in _segment_fields(fields)
            if f"{index}.{name}" in head.fields
        }
        for index in range(_count(head))
    ]
    plain = _plain_values(head, [name for name in fields if name in PLAIN_FIELDS])
    return FieldValues(_plain_values(head, ["episode_id"])["episode_id"], plain, segments)


def fields_of(trajectory: Trajectory, fields: Sequence[str]) -> FieldValues:
    """Return `fields` of a whole trajectory. Raises `QueueError` for an unknown one."""
    names = _segment_fields(fields)
    segments = [
        {name: value for name in names if (value := getattr(segment, name)) is not None}
        for segment in trajectory.segments
    ]
    plain = {name: getattr(trajectory, name) for name in fields if name in PLAIN_FIELDS}
    return FieldValues(trajectory.episode_id, plain, segments)


def encode_journal(entry: JournalEntry) -> bytes:
    columns = [
        Column(name, _dtype_of(values, dtype), values)
        for name, dtype in JOURNAL_DTYPES.items()
        if (values := getattr(entry, name)) is not None
    ]
    plain = {
        "kind": str(entry.kind),
        "context_len": entry.context_len,
        "context_hash": entry.context_hash,
        "data": entry.data,
    }
    return pack(KIND_JOURNAL, columns, plain).joined()


def decode_journal(blob: bytes) -> JournalEntry:
    """The entry, its arrays read-only. Raises `BadPayload` naming the damaged field."""
    head = whole_head(blob, KIND_JOURNAL)
    _check_table(head, JOURNAL_DTYPES)
    try:
        kind = JournalKind(head.plain["kind"])
        return JournalEntry(**{**head.plain, **read_arrays(head, blob), "kind": kind})
    except (KeyError, TypeError, ValueError) as error:
        raise BadPayload(f"head: {error}") from error


def encode_task(task: Task) -> bytes:
    """msgpack of the fields by name. Raises `BadPayload` naming the task and the field that is not plain data."""
    values = {name: getattr(task, name) for name in _TASK_FIELDS}
    if task.group_size is None:
        del values["group_size"]  # as tasks of this `FORMAT` have been written before there was one
    try:
        return pack_plain(values, f"task {task.task_id}")
    except BadPayload:
        for name, value in values.items():
            pack_plain(value, f"task {task.task_id}: {name}")
        raise


def decode_task(blob: bytes) -> Task:
    """Raises `BadPayload` for bytes that are not a task of this version."""
    try:
        return Task(**unpack_plain(blob, "task"))
    except TypeError as error:
        raise BadPayload(f"task: {error}") from error


def outcome_to_plain(outcome: Outcome) -> list[str]:
    # A cause may quote a model's half surrogate pair; refused, it would not be reported at all.
    texts = (str(outcome.kind), outcome.reason, outcome.component)
    return [text.encode("utf-8", "backslashreplace").decode() for text in texts]


def outcome_from_plain(plain: list[str]) -> Outcome:
    """Inverse of `outcome_to_plain`. Raises `BadPayload` for anything else."""
    try:
        kind, reason, component = plain
        return Outcome(OutcomeKind(kind), reason, component)
    except (TypeError, ValueError) as error:
        raise BadPayload(f"outcome: {error}") from error


def _images_to_plain(images: EpisodeImages) -> list[Any]:
    sizes = [[name, len(data)] for name, data in images.data.items()]
    return [sizes, [list(names) for names in images.by_segment], dict(images.urls)]


def _images_from_plain(plain: Any, stored: NDArray[np.uint8] | None) -> EpisodeImages | None:
    """Inverse of `_images_to_plain`, with the bytes. Raises `BadPayload` where the two do not belong together."""
    if plain is None and stored is None:
        return None
    try:
        sizes, by_segment, urls = plain
        whole, data, at = memoryview(stored), {}, 0  # type: ignore[arg-type]
        for name, size in sizes:
            data[name] = bytes(whole[at : at + size])
            at += size
    except (TypeError, ValueError) as error:
        raise BadPayload(f"{IMAGES}: {error}") from error
    if at != len(whole):
        raise BadPayload(f"{IMAGES}: {len(whole)} bytes, {at} by the head")
    return EpisodeImages(by_segment, data, urls)


def _segment_fields(fields: Sequence[str]) -> list[str]:
    for name in fields:
        if name not in _ALL_DTYPES and name not in PLAIN_FIELDS:
            valid = ", ".join((*_ALL_DTYPES, *PLAIN_FIELDS))
            raise QueueError(f"{name!r} is not a field of a trajectory; one of {valid}")
    return [name for name in fields if name in _ALL_DTYPES]


def _count(head: PayloadHead) -> int:
    """Number of segments of a trajectory's head. Raises `BadPayload` unless it has exactly their fields."""
    count = head.plain.get("segments")
    optional = sum(name == IMAGES or name.endswith(_OPTIONAL_ENDS) for name in head.fields)
    if not isinstance(count, int) or len(head.fields) - optional != count * len(SEGMENT_FIELDS):
        raise BadPayload(f"head: {len(head.fields)} fields for {count!r:.80} segments")
    _check_table(head, _segment_table(count))
    return count


@lru_cache(maxsize=8)
def _segment_table(count: int) -> dict[str, str]:
    return {f"{index}.{name}": dtype for index in range(count) for name, dtype in _ALL_DTYPES.items()} | {IMAGES: "u1"}


def _dtype_of(values: Any, dtypes: str) -> str:
    """One of `dtypes`, as ``u1|u2``: that of the array, else the last one."""
    if "|" not in dtypes:
        return dtypes
    names = dtypes.split("|")
    own = getattr(values, "dtype", None)
    return next((name for name in names if own == DTYPES[name]), names[-1])


def _check_table(head: PayloadHead, dtypes: Mapping[str, str]) -> None:
    for name, field in head.fields.items():
        if field.dtype not in dtypes.get(name, "").split("|"):
            raise BadPayload(f"head: field {name} of dtype {field.dtype} is unknown; one of {dict(dtypes)!r:.200}")


def _plain_values(head: PayloadHead, names: Sequence[str]) -> dict[str, Any]:
    missing = [name for name in names if name not in head.plain]
    if missing:
        raise BadPayload(f"head: field {missing[0]} is missing")
    return {name: outcome_from_plain(head.plain[name]) if name == "outcome" else head.plain[name] for name in names}


def pack_announcement(announcement: Announcement) -> bytes:
    return pack_plain([announcement.version, dict(announcement.manifest)], "manifest")


def unpack_announcement(blob: bytes) -> Announcement:
    version, manifest = unpack_plain(blob, "announcement")
    return Announcement(version, manifest)


def mark_of(version: int, packed: bytes) -> AnnouncementMark:
    """Returns the mark of an announcement that `pack_announcement` packed."""
    # 128 bits of SHA-256: two announcements of a run never have the same.
    return AnnouncementMark(version, hashlib.sha256(packed).hexdigest()[:32])


def pack_mark(mark: AnnouncementMark) -> bytes:
    return pack_plain([mark.version, mark.digest], "mark")


def unpack_mark(blob: bytes) -> AnnouncementMark:
    return AnnouncementMark(*unpack_plain(blob, "mark"))
