"""Tiny random episodes, and prints of them by which two processes know that they saw the same one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np

from penstock.transfer_queue import (
    COMPLETED,
    DataCursor,
    JournalEntry,
    JournalKind,
    Lease,
    Outcome,
    OutcomeKind,
    Segment,
    Task,
    Trajectory,
)

EPOCH = 40
"""Tasks per epoch."""
TRUNCATED = Outcome(OutcomeKind.TRUNCATED, "deadline")


def cursor_at(position: int) -> DataCursor:
    return DataCursor(*divmod(position, EPOCH))


def position_of(cursor: DataCursor) -> int:
    return cursor.epoch * EPOCH + cursor.index


def task_id_at(position: int) -> str:
    return f"train/{position:08d}"


def task_at(position: int) -> Task:
    """The same task whoever makes it: a feeder that starts again submits what it submitted before."""
    source = "ab"[crc32(b"source %d" % position) % 2]
    priority = 5 if crc32(b"priority %d" % position) % 7 == 0 else 0
    messages = [{"role": "user", "content": f"{position} + 1"}]
    return Task(task_id_at(position), "train", messages, source, position + 1, priority=priority)


def task_of(episode_id: str) -> str:
    return episode_id.partition("#")[0]


def turns_of(episode_id: str) -> int:
    """1 … 3; every owner of an episode must know when it is done."""
    return 1 + crc32(episode_id.encode()) % 3


def next_entry(
    episode_id: str, entries: Sequence[JournalEntry], version: int, chance: random.Random
) -> JournalEntry | None:
    """A turn is a sampled entry, and a tools entry unless it is the last; None where the last was sampled."""
    if len(entries) == 2 * turns_of(episode_id) - 1:
        return None
    if len(entries) % 2:
        data = {"results": [f"{chance.getrandbits(64):x}"], "sandbox_session": f"box-{chance.getrandbits(16)}"}
        return JournalEntry(JournalKind.TOOLS, data=data)
    length = chance.randint(1, 4)
    return JournalEntry(
        JournalKind.SAMPLED,
        context_len=len(entries),
        context_hash=chance.getrandbits(64),
        ids=np.array([chance.randrange(1 << 20) for _ in range(length)], dtype=np.int32),
        logprobs=np.array([-chance.random() for _ in range(length)], dtype=np.float32),
        version_spans=np.array([[version, 0, length]], dtype=np.int32),
        data={"finish_reason": "stop"},
    )


def trajectory_of(lease: Lease, entries: Sequence[JournalEntry], reward: float | None) -> Trajectory:
    """What the journal says, turn after turn, with one observed token after each."""
    turns = [entry for entry in entries if entry.kind is JournalKind.SAMPLED]
    return Trajectory(
        lease.episode_id,
        lease.task.task_id,
        [_segment(turns)],
        reward,
        COMPLETED if reward is not None else TRUNCATED,
        num_turns=len(turns),
        data_source=lease.task.data_source,
    )


def _segment(turns: Sequence[JournalEntry]) -> Segment:
    ids, mask, logprobs, spans, starts = [], [], [], [], []
    for turn in turns:
        starts.append(len(ids))
        spans += [(version, len(ids) + start, len(ids) + end) for version, start, end in turn.version_spans]
        ids += [*turn.ids, 7]
        mask += [*[1] * len(turn.ids), 0]
        logprobs += [*turn.logprobs, 0.0]
    return Segment(
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.array(ids, dtype=np.int32),
        response_mask=np.array(mask, dtype=np.uint8),
        response_logprobs=np.array(logprobs, dtype=np.float32),
        version_spans=np.array(spans, dtype=np.int32).reshape(-1, 3),
        turn_starts=np.array(starts, dtype=np.int32),
    )


def entry_print(entry: JournalEntry) -> str:
    arrays = [array for array in (entry.ids, entry.logprobs, entry.version_spans) if array is not None]
    plain = [entry.kind, entry.context_len, entry.context_hash, entry.data]
    return _print(plain, [array.tobytes() for array in arrays])


def trajectory_print(trajectory: Trajectory) -> str:
    arrays = [
        np.ascontiguousarray(getattr(segment, name)).tobytes()
        for segment in trajectory.segments
        for name in Segment.__dataclass_fields__
    ]
    return _print([trajectory.episode_id, trajectory.reward, trajectory.outcome.kind], arrays)


def _print(plain: object, arrays: Sequence[bytes]) -> str:
    digest = blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8)
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()
