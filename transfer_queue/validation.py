"""Checks of `submit` and `complete`, and the facts about a finished episode that the index needs.

Everything that depends on the data alone is checked here, before a byte is sent; the queue checks the fence and that
no version is newer than the current one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue.codec.columns import MOST_DIMENSIONS
from penstock.transfer_queue.codec.packing import Packed
from penstock.transfer_queue.codec.trajectories import encode_task, pack_trajectory
from penstock.transfer_queue.errors import BadPayload
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
    sampled: int
    """Sampled tokens among them; those that a branch shares are its parent's."""
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
        max(0, trajectory.num_sampled - (lease.origin.sampled if lease.origin else 0)),
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
    for name, value in trajectory.metrics.items():
        expect(_is_number(value), f"metrics[{name!r:.80}]", f"{value!r:.80} is not a number")
    for index, segment in enumerate(trajectory.segments):
        check_segment(segment, lease.min_version, f"segments[{index}]")
    check_turns(trajectory)
    if trajectory.images is not None:
        _check_images(trajectory.images, len(trajectory.segments))


def check_turns(trajectory: Trajectory) -> None:
    """Raise `BadPayload` unless turn rewards and ``extra["turn_states"]`` are absent or one for each turn."""
    turns, states = sum(segment.num_turns for segment in trajectory.segments), trajectory.extra.get("turn_states")
    for field, values in (("turn_rewards", trajectory.turn_rewards or None), ("extra.turn_states", states)):
        if values is not None:
            expect(isinstance(values, list | tuple), field, f"{type(values).__name__}, a list expected")
            expect(len(values) == turns, field, f"{len(values)} for {turns} turns")
    for value in trajectory.turn_rewards:
        expect(_is_finite(value), "turn_rewards", f"{value!r:.80} is not finite")


def _check_images(images: EpisodeImages, segments: int) -> None:
    """Each image that a segment names is here once, or somewhere else, and its bytes are those of its name."""
    count = len(images.by_segment)
    expect(count == segments, "images.by_segment", f"names images of {count} segments, there are {segments}")
    named, provided = {name for names in images.by_segment for name in names}, {*images.data, *images.urls}
    expect(named == provided, "images", f"{min(named ^ provided, default='')!r:.80} is named or given, not both")
    expect(images.data.keys().isdisjoint(images.urls), "images.urls", "one is of an image that is carried too")
    for name, data in images.data.items():
        expect(isinstance(data, bytes), "images.data", f"{name:.80} is {type(data).__name__}, bytes expected")
        expect(sha256(data).hexdigest() == name, "images.data", f"{name:.80} is not the sha256 of its bytes")


REWARD_TOLERANCE = 1e-6
"""Relative above 1; mirrored by `same_reward` of `lua/shared_groups.lua`."""


def is_reached(reward: float, bound: float) -> bool:
    """Return whether `reward` is `bound` or more, up to the rounding of sums of floats: 0.7 + 0.2 + 0.1 reaches 1."""
    return reward >= bound - REWARD_TOLERANCE * max(1.0, abs(bound))


def same_reward(one: float | None, other: float) -> bool:
    """False for None, the missing reward."""
    return one is not None and is_reached(one, other) and is_reached(other, one)


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `BadPayload` naming the task and the invalid field."""
    for task in tasks:
        for field, value in (("task_id", task.task_id), ("split", task.split)):
            if not (isinstance(value, str) and _NAME.fullmatch(value) and len(value) <= MAX_TASK_ID_CHARS):
                raise BadPayload(
                    f"task {task.task_id!r}: {field} must be 1 to {MAX_TASK_ID_CHARS} printable ASCII characters"
                    f" without spaces, not {value!r}"
                )
        problem = _task_problem(task)
        if problem:
            raise BadPayload(f"task {task.task_id}: {problem}")


def check_task(task: Task) -> None:
    """Raise `BadPayload` naming the field for whatever `submit` would refuse."""
    check_tasks([task])
    encode_task(task)


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


def _is_number(value: Any) -> bool:
    """Return True if a float can hold it; NaN and infinities are numbers."""
    try:
        return isinstance(value, Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


_I4, _F4, _U1, _U2 = (np.dtype(name) for name in ("<i4", "<f4", "u1", "<u2"))
LEAST_EXPERTS = 2
"""Per token and layer: of one alone an unknown choice could not be distinguished from a known one."""


def check_segment(segment: Segment, min_version: int, where: str) -> None:
    """Raise `BadPayload`: lengths, mask of 0 and 1, finite logprobs, spans that cover exactly the sampled tokens.

    `min_version` is the oldest policy version that may have sampled; `where` names the segment in messages. Arrays of
    other dtypes are as good if what is stored of them has the same values.
    """
    _check_ids(segment.prompt_ids, f"{where}.prompt_ids")
    length = len(_check_ids(segment.response_ids, f"{where}.response_ids"))
    mask = _check_mask(segment.response_mask, length, f"{where}.response_mask")
    if length and mask[0] and not len(segment.prompt_ids):
        raise BadPayload(f"{where}.prompt_ids: is empty, so the first sampled id has no context")
    _check_logprobs(segment.response_logprobs, (length,), f"{where}.response_logprobs")
    if segment.teacher_logprobs is not None:
        _check_logprobs(segment.teacher_logprobs, (length,), f"{where}.teacher_logprobs")
    if segment.routed_experts is not None:
        _check_experts(segment.routed_experts, len(segment.prompt_ids) + length, f"{where}.routed_experts")
    if segment.teacher_top_ids is not None or segment.teacher_top_logprobs is not None:
        _check_tops(segment, int(np.count_nonzero(mask)), where)
    _check_turns(segment.turn_starts, length, f"{where}.turn_starts")
    _check_spans(segment.version_spans, mask, min_version, f"{where}.version_spans")


def expect(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise BadPayload(f"{field}: {problem}")


# `check_segment` runs for every episode: messages are made only where something is wrong.
def _check_integers(values: Any, field: str) -> NDArray[Any]:
    """Reject values outside int32, which would be stored as other numbers."""
    array = np.asarray(values)
    if array.size and array.dtype != _I4:
        if array.dtype.kind not in "iu":
            raise BadPayload(f"{field}: dtype {array.dtype}, integers expected")
        if int(array.max()) >= 2**31 or int(array.min()) < -(2**31):
            raise BadPayload(f"{field}: holds values over int32")
    return array


def _check_ids(values: Any, field: str) -> NDArray[Any]:
    array = _check_integers(values, field)
    if array.ndim != 1:
        raise BadPayload(f"{field}: has {array.ndim} dimensions, 1 expected")
    if array.size and int(array.min()) < 0:
        raise BadPayload(f"{field}: holds negative values")
    return array


def _check_mask(values: Any, length: int, field: str) -> NDArray[np.uint8]:
    mask = np.asarray(values)
    if mask.shape != (length,):
        raise BadPayload(f"{field}: shape {mask.shape}, response_ids has {length}")
    if mask.size and mask.dtype.kind not in "biuf":
        raise BadPayload(f"{field}: dtype {mask.dtype}, numbers expected")
    if not (int(mask.max(initial=0)) <= 1 if mask.dtype == _U1 else ((mask == 0) | (mask == 1)).all()):
        raise BadPayload(f"{field}: holds other values than 0 and 1")
    return mask.astype(_U1, copy=False)


def _check_logprobs(values: Any, shape: tuple[int, ...], field: str) -> NDArray[np.float32]:
    logprobs = np.asarray(values)
    if logprobs.shape != shape:
        raise BadPayload(f"{field}: shape {logprobs.shape}, not {list(shape)}")
    if logprobs.size and logprobs.dtype.kind not in "fiu":
        raise BadPayload(f"{field}: dtype {logprobs.dtype}, floats expected")
    if logprobs.dtype != _F4:
        with np.errstate(over="ignore"):
            logprobs = logprobs.astype(_F4)  # a finite float64 may be over what is stored
    if not np.isfinite(logprobs).all():
        raise BadPayload(f"{field}: holds NaN or infinite values")
    return logprobs


def _check_experts(experts: Any, length: int, field: str) -> None:
    array = np.asarray(experts)
    if array.dtype not in (_U1, _U2):
        raise BadPayload(f"{field}: dtype {array.dtype}, uint8 or uint16 expected")
    shape = array.shape
    if array.ndim != MOST_DIMENSIONS or shape[0] != length or shape[1] < 1 or shape[2] < LEAST_EXPERTS:
        raise BadPayload(f"{field}: shape {shape}, not [{length}, layers, k] with k of {LEAST_EXPERTS} or more")


def _check_tops(segment: Segment, sampled: int, where: str) -> None:
    field = f"{where}.teacher_top_ids"
    expect(segment.teacher_logprobs is not None, field, "there are no teacher_logprobs with them")
    shape = np.shape(segment.teacher_top_ids)  # type: ignore[arg-type]
    good = len(shape) == 2 and shape[0] == sampled and shape[1] >= 1
    expect(good, field, f"shape {shape}, not [{sampled}, k]: a row for each sampled id")
    ids = _check_integers(segment.teacher_top_ids, field)
    expect(int(ids.min(initial=0)) >= 0, field, "holds negative values")
    twins = np.diff(np.sort(ids, axis=1), axis=1) == 0
    expect(not twins.any(), field, "holds an id twice for one token")
    field = f"{where}.teacher_top_logprobs"
    dtype = np.asarray(segment.teacher_top_logprobs).dtype
    expect(dtype.kind != "i", field, f"dtype {dtype}, floats expected")
    logprobs = _check_logprobs(segment.teacher_top_logprobs, shape, field)
    mass = float(np.exp(np.minimum(logprobs, 1.0), dtype=np.float64).sum(axis=1).max(initial=0.0))
    # Probabilities of one token's likeliest ids sum to 1.01 at most: servers round, in half precision by thousandths.
    expect(mass <= 1.01, field, f"probabilities of one token's ids sum to {mass:.3g}")


def _check_turns(values: Any, length: int, field: str) -> None:
    starts = _check_ids(values, field).tolist()
    if starts != sorted(starts):
        raise BadPayload(f"{field}: is not in order")
    if starts and starts[-1] > length:
        raise BadPayload(f"{field}: points behind the response of {length} tokens")


def _check_spans(values: Any, mask: NDArray[np.uint8], min_version: int, field: str) -> None:
    """Each sampled position is in exactly one span [version, start, end], and no other position is in any."""
    spans = _check_integers(values, field)
    if spans.size and (spans.ndim != 2 or spans.shape[1] != 3):
        raise BadPayload(f"{field}: shape {spans.shape}, not [S, 3]")
    covered, sampled = np.zeros(len(mask), np.uint8), 0
    for version, start, end in spans.reshape(-1, 3).tolist():
        if not 0 <= start < end <= len(mask):
            raise BadPayload(f"{field}: span {start} to {end} of version {version} is outside of 0 to {len(mask)}")
        if version < max(min_version, 0):
            problem = "is negative" if version < 0 else f"is below the lease's floor {min_version}"
            raise BadPayload(f"{field}: version {version} {problem}")
        covered[start:end] += 1
        sampled += end - start
    if sampled != np.count_nonzero(mask) or covered.tobytes() != mask.tobytes():
        at = int(np.argmax(covered != mask))
        raise BadPayload(f"{field}: response position {at} (mask {mask[at]}) is covered by {covered[at]} spans")
