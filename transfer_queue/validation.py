"""Checks of `submit` and `complete`, and the facts about a finished episode that the index needs.

Everything that depends on the data alone is checked here, before a byte is sent; the queue checks the fence and that
no version is newer than the current one.

A segment is first tested by `_is_plain`, which is fast and true only where all rules hold; otherwise the exact rules
decide and name the field. So the fast test may miss good segments (other dtypes, very many spans), but never accepts a
bad one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue.codec.columns import MOST_DIMENSIONS
from penstock.transfer_queue.codec.packing import Packed
from penstock.transfer_queue.codec.trajectories import pack_trajectory
from penstock.transfer_queue.errors import BadPayload, QueueError
from penstock.transfer_queue.types import EpisodeImages, Lease, Segment, Task, Trajectory

MAX_PAYLOAD_BYTES = 256 << 20
"""Redis itself refuses values over 512 MiB."""
MAX_TASK_ID_CHARS = 200
MAX_SOURCE_CHARS = 200
MAX_PRIORITY = 1000
_NAME = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """A checked, packed trajectory with the numbers that the index stores."""

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
) -> FinishedEpisode:
    """Check and pack the trajectory of `lease`.

    Raises `BadPayload` naming the field, `QueueError` for an unavailable compression.
    """
    check_trajectory(lease, trajectory)
    packed = pack_trajectory(trajectory, compression)
    if packed.size > max_bytes:
        raise BadPayload(f"payload of {trajectory.episode_id}: {packed.size} bytes, over the limit of {max_bytes}")
    spans = [np.asarray(segment.version_spans).reshape(-1, 3) for segment in trajectory.segments]
    versions = [version for rows in spans for version in rows[:, 0].tolist()]
    return FinishedEpisode(
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
    if trajectory.images is not None:
        _check_images(trajectory.images, len(trajectory.segments))


def _check_images(images: EpisodeImages, segments: int) -> None:
    """Each image that a segment names is here once, or somewhere else, and its bytes are those of its name."""
    count = len(images.by_segment)
    expect(count == segments, "images.by_segment", f"names images of {count} segments, there are {segments}")
    named, given = {name for names in images.by_segment for name in names}, {*images.data, *images.urls}
    expect(named == given, "images", f"{min(named ^ given, default='')!r:.80} is named or given, not both")
    expect(images.data.keys().isdisjoint(images.urls), "images.urls", "one is of an image that is carried too")
    for name, data in images.data.items():
        expect(isinstance(data, bytes), "images.data", f"{name:.80} is {type(data).__name__}, bytes expected")
        expect(sha256(data).hexdigest() == name, "images.data", f"{name:.80} is not the sha256 of its bytes")


def check_leases(leases: Sequence[Lease]) -> None:
    """Raise `QueueError` naming a lease that stands there twice."""
    counted = Counter((lease.episode_id, lease.fence) for lease in leases)
    for (episode_id, fence), count in counted.items():
        if count > 1:
            raise QueueError(f"{episode_id}: its lease {fence} stands {count} times in one call")


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `QueueError` naming the task and the invalid field."""
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
    if task.group_size is not None and not (isinstance(task.group_size, Integral) and task.group_size >= 1):
        return f"group_size is {task.group_size!r}, not a whole number from 1 on, and not None"
    return None


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


_I4, _U4, _F4, _U1, _U2 = (np.dtype(name) for name in ("<i4", "<u4", "<f4", "u1", "<u2"))
LEAST_EXPERTS = 2
"""Per token and layer: of one alone an unknown choice could not be distinguished from a known one."""
MOST_MASS = 1.01
"""Of the likeliest ids of one token together: servers round, in half precision by some thousandths."""
_FEW_SPANS = 2048
"""Up to here one memchr per span is quicker than counting covers position by position."""


def check_segment(segment: Segment, min_version: int, where: str) -> None:
    """Raise `BadPayload`: lengths, mask of 0 and 1, finite logprobs, spans that cover exactly the sampled tokens.

    `min_version` is the oldest policy version that may have sampled; `where` names the segment in messages.
    """
    if not _is_plain(segment, max(min_version, 0)):
        _refuse_bad(segment, min_version, where)


def expect(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise BadPayload(f"{field}: {problem}")


# the quick look ------------------------------------------------------------------------------------------------------
def _is_plain(segment: Segment, floor: int) -> bool:
    ids, mask, logprobs = segment.response_ids, segment.response_mask, segment.response_logprobs
    return (
        _are_ids(segment.prompt_ids)
        and _are_ids(ids)
        and _is_row(mask, _U1, len(ids))
        and (not len(ids) or int(np.maximum.reduce(mask)) <= 1)
        and _are_logprobs(logprobs, len(ids))
        and (segment.teacher_logprobs is None or _are_logprobs(segment.teacher_logprobs, len(ids)))
        and (segment.routed_experts is None or _are_experts(segment.routed_experts, len(segment.prompt_ids) + len(ids)))
        and _are_tops(segment, mask)
        and _are_turns(segment.turn_starts, len(ids))
        and _cover(segment.version_spans, mask, floor)
    )


def _is_row(values: Any, dtype: np.dtype[Any], length: int) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == dtype and values.shape == (length,)


def _are_logprobs(values: Any, length: int) -> bool:
    return _is_row(values, _F4, length) and bool(np.logical_and.reduce(np.isfinite(values)))


def _are_experts(values: Any, length: int) -> bool:
    if not (isinstance(values, np.ndarray) and values.dtype in (_U1, _U2) and values.ndim == MOST_DIMENSIONS):
        return False
    return len(values) == length and values.shape[1] >= 1 and values.shape[2] >= LEAST_EXPERTS


def _are_tops(segment: Segment, mask: NDArray[np.uint8]) -> bool:
    ids, logprobs = segment.teacher_top_ids, segment.teacher_top_logprobs
    if ids is None and logprobs is None:
        return True
    if not (isinstance(ids, np.ndarray) and isinstance(logprobs, np.ndarray)) or segment.teacher_logprobs is None:
        return False
    if not ((ids.dtype, logprobs.dtype) == (_I4, _F4) and ids.ndim == 2 and ids.shape == logprobs.shape):
        return False
    if len(ids) != np.count_nonzero(mask) or ids.shape[1] < 1:
        return False
    return int(ids.min(initial=0)) >= 0 and not _has_twins(ids) and _top_mass(logprobs) <= MOST_MASS


def _has_twins(ids: NDArray[Any]) -> bool:
    """Whether an id stands twice in a row."""
    return bool((np.diff(np.sort(ids, axis=1), axis=1) == 0).any())


def _top_mass(logprobs: NDArray[Any]) -> float:
    """The largest sum of a row's probabilities; infinite where a number is not finite."""
    if not np.isfinite(logprobs).all():
        return math.inf
    return float(np.exp(np.minimum(logprobs, 1.0), dtype=np.float64).sum(axis=1).max(initial=0.0))


def _are_ids(values: Any) -> bool:
    if not (isinstance(values, np.ndarray) and values.dtype == _I4 and values.ndim == 1):
        return False
    return not values.size or int(np.maximum.reduce(values.view(_U4))) < 2**31  # a negative id has the highest bit


def _are_turns(starts: Any, length: int) -> bool:
    if not (isinstance(starts, np.ndarray) and starts.dtype == _I4 and starts.ndim == 1):
        return False
    found = starts.tolist()
    return not found or (found[0] >= 0 and found[-1] <= length and found == sorted(found))


def _cover(spans: Any, mask: NDArray[np.uint8], floor: int) -> bool:
    """Whether the spans are ordered, disjoint, and cover exactly the sampled positions."""
    if not (isinstance(spans, np.ndarray) and spans.dtype == _I4 and spans.ndim == 2 and spans.shape[1] == 3):
        return False
    if len(spans) > _FEW_SPANS:
        return False
    raw, at, sampled = mask.tobytes(), 0, 0
    for version, start, end in spans.tolist():
        if version < floor or not at <= start < end <= len(raw) or raw.find(0, start, end) >= 0:
            return False
        at, sampled = end, sampled + end - start
    return sampled == np.count_nonzero(mask.view(np.bool_))


# the rules -----------------------------------------------------------------------------------------------------------
def _refuse_bad(segment: Segment, min_version: int, where: str) -> None:
    for name in ("prompt_ids", "response_ids", "turn_starts"):
        _check_ids(np.asarray(getattr(segment, name)), f"{where}.{name}")
    length = len(segment.response_ids)
    mask, logprobs = np.asarray(segment.response_mask), np.asarray(segment.response_logprobs)
    for name, values in (("response_mask", mask), ("response_logprobs", logprobs)):
        expect(values.shape == (length,), f"{where}.{name}", f"shape {values.shape}, response_ids has {length}")
    _check_mask(mask, f"{where}.response_mask")
    _check_logprobs(logprobs, f"{where}.response_logprobs")
    if segment.teacher_logprobs is not None:
        taught = np.asarray(segment.teacher_logprobs)
        expect(taught.shape == (length,), f"{where}.teacher_logprobs", f"shape {taught.shape}, not [{length}]")
        _check_logprobs(taught, f"{where}.teacher_logprobs")
    if segment.routed_experts is not None:
        _check_experts(segment.routed_experts, len(segment.prompt_ids) + length, f"{where}.routed_experts")
    _check_tops(segment, int((mask == 1).sum()), where)
    _check_turns(np.asarray(segment.turn_starts), length, f"{where}.turn_starts")
    _check_spans(np.asarray(segment.version_spans), mask, min_version, f"{where}.version_spans")


def _check_ids(array: NDArray[Any], field: str) -> None:
    expect(array.ndim == 1, field, f"has {array.ndim} dimensions, 1 expected")
    _check_integers(array, field)
    expect(array.size == 0 or int(array.min()) >= 0, field, "holds negative values")


def _check_integers(array: NDArray[Any], field: str) -> None:
    """Reject values outside int32, which would be stored as other numbers."""
    expect(array.size == 0 or array.dtype.kind in "iu", field, f"dtype {array.dtype}, integers expected")
    expect(array.size == 0 or int(array.max()) < 2**31, field, "holds values over int32")


def _check_mask(mask: NDArray[Any], field: str) -> None:
    expect(mask.size == 0 or mask.dtype.kind in "biuf", field, f"dtype {mask.dtype}, numbers expected")
    expect(bool(((mask == 0) | (mask == 1)).all()), field, "holds other values than 0 and 1")


def _check_logprobs(logprobs: NDArray[Any], field: str) -> None:
    expect(logprobs.size == 0 or logprobs.dtype.kind in "fiu", field, f"dtype {logprobs.dtype}, floats expected")
    with np.errstate(over="ignore"):
        stored = logprobs.astype(_F4)  # a finite float64 may be over what is stored
    expect(bool(np.isfinite(stored).all()), field, "holds NaN or infinite values")


def _check_experts(experts: Any, length: int, field: str) -> None:
    dtype, shape = getattr(experts, "dtype", type(experts).__name__), np.shape(experts)
    expect(dtype in (_U1, _U2), field, f"dtype {dtype}, uint8 or uint16 expected")
    problem = f"shape {shape}, not [{length}, layers, k] with k of {LEAST_EXPERTS} or more"
    expect(_are_experts(experts, length), field, problem)


def _check_tops(segment: Segment, sampled: int, where: str) -> None:
    if segment.teacher_top_ids is None and segment.teacher_top_logprobs is None:
        return
    ids, logprobs = np.asarray(segment.teacher_top_ids), np.asarray(segment.teacher_top_logprobs)
    field = f"{where}.teacher_top_ids"
    expect(segment.teacher_logprobs is not None, field, "there are no teacher_logprobs beside them")
    good = ids.ndim == 2 and len(ids) == sampled and ids.shape[1] >= 1
    expect(good, field, f"shape {ids.shape}, not [{sampled}, k]: a row for each sampled id")
    _check_integers(ids, field)
    expect(int(ids.min(initial=0)) >= 0, field, "holds negative values")
    expect(not _has_twins(ids), field, "holds an id twice for one token")
    field = f"{where}.teacher_top_logprobs"
    expect(logprobs.shape == ids.shape, field, f"shape {logprobs.shape}, teacher_top_ids has {ids.shape}")
    expect(logprobs.dtype.kind == "f", field, f"dtype {logprobs.dtype}, floats expected")
    expect(bool(np.isfinite(logprobs).all()), field, "holds NaN or infinite values")
    mass = _top_mass(logprobs)
    expect(mass <= MOST_MASS, field, f"probabilities of one token's ids sum to {mass:.3g}")


def _check_turns(starts: NDArray[Any], length: int, field: str) -> None:
    expect(bool((starts <= length).all()), field, f"points behind the response of {length} tokens")
    expect(bool((starts[1:] >= starts[:-1]).all()), field, "is not in order")


def _check_spans(spans: NDArray[Any], mask: NDArray[Any], min_version: int, field: str) -> None:
    expect(spans.size == 0 or (spans.ndim == 2 and spans.shape[1] == 3), field, f"shape {spans.shape}, not [S, 3]")
    _check_integers(spans, field)
    rows = spans.reshape(-1, 3)
    versions, starts, ends = rows.T
    for version, start, end in rows[(starts < 0) | (starts >= ends) | (ends > len(mask))][:1]:
        raise BadPayload(f"{field}: span {start} to {end} of version {version} is outside of 0 to {len(mask)}")
    oldest = int(versions.min(initial=max(min_version, 0)))
    expect(oldest >= 0, field, f"version {oldest} is negative")
    expect(oldest >= min_version, field, f"version {oldest} is below the lease's floor {min_version}")
    _check_cover(starts.astype(np.int64), ends.astype(np.int64), mask, field)


def _check_cover(starts: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any], field: str) -> None:
    size = len(mask) + 1
    covered = np.cumsum(np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size))[:-1]
    wrong = np.flatnonzero(covered != mask)
    if len(wrong):
        at = int(wrong[0])
        raise BadPayload(f"{field}: response position {at} (mask {mask[at]}) is covered by {covered[at]} spans")
