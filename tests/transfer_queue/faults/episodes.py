"""Tiny random episodes and prints of them, files of JSON lines that outlive their writer, and the shared log of what
owners of an episode journaled."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
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


POISON_EVERY = 40
"""Tasks from one whose first episode is poison to the next."""


def is_poison(episode_id: str) -> bool:
    """Whoever runs it dies of it, as of a row that makes its worker run out of memory."""
    task_id, _, member = episode_id.partition("#")
    return member == "0" and int(task_id.rpartition("/")[2]) % POISON_EVERY == POISON_EVERY // 8


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


def shared_print(entries: Sequence[JournalEntry]) -> str:
    """The first of the journal entries that branches share."""
    return entry_print(entries[0])


def trajectory_print(trajectory: Trajectory) -> str:
    arrays = [
        np.ascontiguousarray(array).tobytes()
        for segment in trajectory.segments
        for name in Segment.__dataclass_fields__
        if (array := getattr(segment, name)) is not None
    ]
    return _print([trajectory.episode_id, trajectory.reward, trajectory.outcome.kind], arrays)


def _print(plain: object, arrays: Sequence[bytes]) -> str:
    digest = blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8)
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


class Records:
    """One file; several processes may append. With `durable`, a line is on disk when `write` returns."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        # Lines appended by one write each do not mix, whoever else appends.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps({"kind": kind, **fields}) + "\n").encode())
        if self._durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line; none where there is no file. A line that a kill cut off was never written."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """All records of all files of a folder, file by file."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path)]


class JournalBroken(AssertionError):
    """A lease came with other entries than the owners before journaled."""


class JournalBook:
    """One file per episode that is under way. Only processes die here, never the machine: no fsync."""

    def __init__(self, folder: Path, *, may_lose_tail: bool) -> None:
        self._folder = folder
        self._may_lose_tail = may_lose_tail

    def write(self, lease: Lease, kind: str, entry: JournalEntry) -> None:
        """`kind` is ``about`` before the queue is told, ``told`` after it answered."""
        records = Records(self._path(lease.episode_id), durable=False)
        try:
            records.write(kind, entry=entry_print(entry), fence=lease.fence)
        finally:
            records.close()

    def close(self, episode_id: str) -> None:
        """The episode is acknowledged: nobody will resume it, unless that is lost."""
        if not self._may_lose_tail:
            self._path(episode_id).unlink(missing_ok=True)

    def check(self, lease: Lease) -> None:
        """Raises `JournalBroken` unless the lease's journal is, in order, what was journaled behind its origin.

        Entries whose owner saw no answer may be there or not; a queue that lost its tail may miss the newest. What
        later owners journaled, because this lease ran out before its owner came to it, does not count.
        """
        records = read_records(self._path(lease.episode_id))
        if not self._may_lose_tail:
            records = [record for record in records if record["fence"] < lease.fence]
        journal = [entry_print(entry) for entry in lease.journal[lease.origin.entries if lease.origin else 0 :]]
        begun = [record["entry"] for record in records if record["kind"] == "about"]
        told = [record["entry"] for record in records if record["kind"] == "told"]
        if not _in_order(journal, begun) or not (self._may_lose_tail or _in_order(told, journal)):
            raise JournalBroken(f"{lease.episode_id}@{lease.fence}: {journal}, but journaled was {records}")

    def _path(self, episode_id: str) -> Path:
        return self._folder / f"{episode_id.replace('/', '_')}.jsonl"


def _in_order(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether `part` is `whole` with some left out."""
    rest = iter(whole)
    return all(item in rest for item in part)
