"""What `complete` and `submit` refuse, and what the index has to know of a finished episode.

Everything that needs only the data itself is checked here, before any byte is sent; the ledger checks the fence and
that no version is newer than the current one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue.codec import encode_trajectory
from penstock.transfer_queue.ledger import BadPayload, Lease, LedgerError
from penstock.transfer_queue.trajectory import Segment, Task, Trajectory

MAX_PAYLOAD_BYTES = 256 << 20
"""Redis itself refuses values over 512 MiB."""
MAX_TASK_ID_CHARS = 200
_NAME = re.compile(r"^[!-~]+$")


@dataclass(frozen=True, slots=True)
class Finished:
    """A checked, packed trajectory with the few numbers that the index keeps."""

    blob: bytes
    reward: float | None
    tokens: int
    lowest_version: int | None
    """Oldest version of any sampled token; None where nothing was sampled."""
    highest_version: int


def finish(lease: Lease, trajectory: Trajectory, max_bytes: int = MAX_PAYLOAD_BYTES, compression="none") -> Finished:
    """Check and pack the trajectory of `lease`. Raises `BadPayload` naming the field."""
    check_trajectory(lease, trajectory)
    blob = encode_trajectory(trajectory)
    if len(blob) > max_bytes:
        raise BadPayload(f"payload of {trajectory.episode_id}: {len(blob)} bytes, over the limit of {max_bytes}")
    highest = max((int(s.version_spans[:, 0].max()) for s in trajectory.segments if len(s.version_spans)), default=0)
    return Finished(
        blob, trajectory.reward, sum(len(s.response_ids) for s in trajectory.segments), trajectory.min_version, highest
    )


def check_trajectory(lease: Lease, trajectory: Trajectory) -> None:
    """Raise `BadPayload` naming the first field that is wrong."""
    _expect(trajectory.episode_id == lease.episode_id, "episode_id", f"{trajectory.episode_id!r} is not the lease's")
    _expect(trajectory.task_id == lease.task.task_id, "task_id", f"{trajectory.task_id!r} is not the lease's")
    if trajectory.reward is not None:
        _expect(math.isfinite(trajectory.reward), "reward", f"{trajectory.reward} is not finite")
        _expect(trajectory.outcome.may_carry_reward, "reward", f"{trajectory.outcome.kind} may not carry one")
    for index, segment in enumerate(trajectory.segments):
        check_segment(segment, lease.min_version, f"segments[{index}]")


def check_segment(segment: Segment, min_version: int, where: str) -> None:
    """Raise `BadPayload`: lengths, mask of 0 and 1, finite logprobs, spans that cover exactly the sampled tokens."""
    for name in ("prompt_ids", "response_ids", "turn_starts"):
        _check_ids(getattr(segment, name), f"{where}.{name}")
    length = len(segment.response_ids)
    for name in ("response_mask", "response_logprobs"):
        values = np.asarray(getattr(segment, name))
        _expect(values.shape == (length,), f"{where}.{name}", f"shape {values.shape}, response_ids has {length}")
    mask, logprobs = np.asarray(segment.response_mask), np.asarray(segment.response_logprobs)
    _expect(bool(np.isin(mask, (0, 1)).all()), f"{where}.response_mask", "holds other values than 0 and 1")
    _expect(bool(np.isfinite(logprobs).all()), f"{where}.response_logprobs", "holds NaN or infinite values")
    _check_turns(np.asarray(segment.turn_starts), length, f"{where}.turn_starts")
    _check_spans(np.asarray(segment.version_spans), mask, min_version, f"{where}.version_spans")


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `LedgerError` naming the task whose name the ledger cannot keep."""
    for task in tasks:
        for field, value in (("task_id", task.task_id), ("lane", task.lane)):
            if not _NAME.match(value) or len(value) > MAX_TASK_ID_CHARS:
                raise LedgerError(
                    f"task {task.task_id!r}: {field} must be 1 to {MAX_TASK_ID_CHARS} printable ASCII characters"
                    f" without spaces, not {value!r}"
                )
        if abs(task.priority) > 1000:
            raise LedgerError(f"priority {task.priority}")
        if task.min_version < 0:
            raise LedgerError(f"task {task.task_id}: min_version is {task.min_version}, below 0")


def _check_ids(values: Any, field: str) -> None:
    array = np.asarray(values)
    _expect(array.ndim == 1, field, f"has {array.ndim} dimensions, 1 expected")
    _expect(array.size == 0 or array.dtype.kind in "iu", field, f"dtype {array.dtype}, integers expected")
    _expect(array.size == 0 or int(array.min()) >= 0, field, "holds negative values")
    _expect(array.size == 0 or int(array.max()) < 2**31, field, "holds values over int32")


def _check_turns(starts: NDArray[Any], length: int, field: str) -> None:
    _expect(bool((starts <= length).all()), field, f"points behind the response of {length} tokens")
    _expect(bool((np.diff(starts) >= 0).all()), field, "is not in order")


def _check_spans(spans: NDArray[Any], mask: NDArray[Any], min_version: int, field: str) -> None:
    _expect(spans.size == 0 or (spans.ndim == 2 and spans.shape[1] == 3), field, f"shape {spans.shape}, not [S, 3]")
    _expect(spans.size == 0 or spans.dtype.kind in "iu", field, f"dtype {spans.dtype}, integers expected")
    versions, starts, ends = spans.reshape(-1, 3).T
    for version, start, end in spans.reshape(-1, 3)[(starts < 0) | (starts >= ends) | (ends > len(mask))][:1]:
        raise BadPayload(f"{field}: span {start} to {end} of version {version} is outside of 0 to {len(mask)}")
    oldest = int(versions.min(initial=max(min_version, 0)))
    _expect(oldest >= 0, field, f"version {oldest} is negative")
    _expect(oldest >= min_version, field, f"version {oldest} is below the lease's floor {min_version}")
    edges = np.zeros(len(mask) + 1, dtype=np.int64)
    np.add.at(edges, starts.astype(np.int64), 1)
    np.add.at(edges, ends.astype(np.int64), -1)
    covered = np.cumsum(edges)[:-1]
    wrong = np.flatnonzero(covered != mask)
    if len(wrong):
        at = int(wrong[0])
        raise BadPayload(f"{field}: response position {at} (mask {mask[at]}) is covered by {covered[at]} spans")


def _expect(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise BadPayload(f"{field}: {problem}")
