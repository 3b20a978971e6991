"""What `complete` and `submit` refuse, and what the index has to know of a finished episode.

Everything that needs only the data itself is checked here, before any byte is sent; the queue checks the fence and
that no version is newer than the current one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from penstock.transfer_queue.codec import pack_trajectory
from penstock.transfer_queue.packing import Packed
from penstock.transfer_queue.queue import BadPayload, Lease, QueueError
from penstock.transfer_queue.segment_checks import check_segment, expect
from penstock.transfer_queue.trajectory import Task, Trajectory

MAX_PAYLOAD_BYTES = 256 << 20
"""Redis itself refuses values over 512 MiB."""
MAX_TASK_ID_CHARS = 200
MAX_SOURCE_CHARS = 200
MAX_PRIORITY = 1000
_NAME = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Finished:
    """A checked, packed trajectory with the few numbers that the index keeps."""

    packed: Packed
    reward: float | None
    tokens: int
    """Length of all responses together, observations included."""
    lowest_version: int | None
    """Oldest version of any sampled token; None where nothing was sampled."""
    highest_version: int
    """Newest one; 0 where nothing was sampled."""


def finish(
    lease: Lease, trajectory: Trajectory, max_bytes: int = MAX_PAYLOAD_BYTES, compression: str = "none"
) -> Finished:
    """Check and pack the trajectory of `lease`.

    Raises `BadPayload` naming the field, `QueueError` for a compression that this build has not.
    """
    check_trajectory(lease, trajectory)
    packed = pack_trajectory(trajectory, compression)
    if packed.size > max_bytes:
        raise BadPayload(f"payload of {trajectory.episode_id}: {packed.size} bytes, over the limit of {max_bytes}")
    spans = [np.asarray(segment.version_spans).reshape(-1, 3) for segment in trajectory.segments]
    versions = [version for rows in spans for version in rows[:, 0].tolist()]
    return Finished(
        packed,
        None if trajectory.reward is None else float(trajectory.reward),
        sum(len(segment.response_ids) for segment in trajectory.segments),
        min(versions, default=None),
        max(versions, default=0),
    )


def check_trajectory(lease: Lease, trajectory: Trajectory) -> None:
    """Raise `BadPayload` naming the first field that is wrong."""
    expect(trajectory.episode_id == lease.episode_id, "episode_id", f"{trajectory.episode_id!r} is not the lease's")
    expect(trajectory.task_id == lease.task.task_id, "task_id", f"{trajectory.task_id!r} is not the lease's")
    if trajectory.reward is not None:
        expect(_is_finite(trajectory.reward), "reward", f"{trajectory.reward!r:.80} is not finite")
        expect(trajectory.outcome.may_carry_reward, "reward", f"{trajectory.outcome.kind} may not carry one")
    for index, segment in enumerate(trajectory.segments):
        check_segment(segment, lease.min_version, f"segments[{index}]")


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `QueueError` naming the task and the field that the queue cannot keep."""
    for task in tasks:
        for field, value in (("task_id", task.task_id), ("split", task.split)):
            if not (isinstance(value, str) and _NAME.fullmatch(value) and len(value) <= MAX_TASK_ID_CHARS):
                raise QueueError(
                    f"task {task.task_id!r}: {field} must be 1 to {MAX_TASK_ID_CHARS} printable ASCII characters"
                    f" without spaces, not {value!r}"
                )
        problem = _task_problem(task)
        if problem:
            raise QueueError(f"task {task.task_id}: {problem}")


def _task_problem(task: Task) -> str | None:
    source, priority = task.data_source, task.priority
    if not (isinstance(source, str) and source.isprintable() and len(source) <= MAX_SOURCE_CHARS):
        return f"data_source must be at most {MAX_SOURCE_CHARS} printable characters, not {source!r:.300}"
    if not (isinstance(priority, Integral) and abs(priority) <= MAX_PRIORITY):
        return f"priority is {priority!r}, not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
    if task.min_version < 0:
        return f"min_version is {task.min_version}, below 0"
    return None


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
