"""Trajectories as a table of Arrow, one row per episode, and back without a change of a bit.

    step, episode, task, data_source, reward, outcome …        a value per episode; the index has these columns too
    turn_rewards, metrics, extra, images                       nested; `extra` is JSON
    segments                                                   structs of lists: the fields of `Segment`

An optional field of `Segment` that no episode of the table has is no column of it. Arrays of two or three dimensions
lie flat next to a list NAME_shape. An image that several episodes carry has its bytes in the first of their rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.transfer_queue.codec.trajectories import OPTIONAL_FIELDS, SEGMENT_FIELDS
from penstock.transfer_queue.types import EpisodeImages, Outcome, OutcomeKind, Segment, Trajectory

LISTS = {
    **dict.fromkeys(("prompt_ids", "response_ids", "turn_starts", "teacher_top_ids"), pa.int32()),
    **dict.fromkeys(("response_logprobs", "teacher_logprobs", "teacher_top_logprobs"), pa.float32()),
    "response_mask": pa.uint8(),
    "routed_experts": None,
}
"""Field of a segment → its type in the table; None: that of the widest array."""
SHAPED = ("routed_experts", "teacher_top_ids", "teacher_top_logprobs")
SPAN = ("version", "start", "end")
VALUES = {
    "step": pa.int64(),
    "episode": pa.string(),
    "task": pa.string(),
    "data_source": pa.string(),
    "reward": pa.float64(),
    "outcome": pa.string(),
    "outcome_reason": pa.string(),
    "outcome_component": pa.string(),
    "num_turns": pa.int32(),
    "tokens": pa.int64(),
    "oldest_version": pa.int32(),
    "newest_version": pa.int32(),
}
"""Columns with one value per episode. `tokens` are the sampled ones."""
NESTED = {
    "turn_rewards": pa.list_(pa.float64()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "extra": pa.string(),
    "images": pa.struct(
        {
            "by_segment": pa.list_(pa.list_(pa.string())),
            "data": pa.list_(pa.struct({"name": pa.string(), "bytes": pa.large_binary()})),
            "urls": pa.map_(pa.string(), pa.string()),
        }
    ),
}


def table_of(step: int, trajectories: Sequence[Trajectory]) -> pa.Table:
    """Return the trajectories of `step` as a table, in their order."""
    values = [_values_of(step, one) for one in trajectories]
    columns = {name: pa.array([row[name] for row in values], kind) for name, kind in VALUES.items()}
    columns |= _nested_of(trajectories)
    counts = [len(one.segments) for one in trajectories]
    columns["segments"] = _lists(counts, _segments_of([segment for one in trajectories for segment in one.segments]))
    return pa.table(columns)


def trajectories_of(table: pa.Table, rows: Iterable[int]) -> list[Trajectory]:
    """Return the trajectories in these rows of a table that `table_of` made; their arrays are read-only."""
    segments = table["segments"].combine_chunks()
    bounds, cut = segments.offsets.to_numpy(), _segment_reader(segments.values)
    plain = table.drop_columns(["segments"]).to_pylist()
    images = {one["name"]: one["bytes"] for row in plain for one in _images_in(row) if one["bytes"] is not None}
    trajectories = []
    for row in rows:
        value = plain[row]
        trajectories.append(
            Trajectory(
                episode_id=value["episode"],
                task_id=value["task"],
                segments=[cut(place) for place in range(bounds[row], bounds[row + 1])],
                reward=value["reward"],
                outcome=Outcome(OutcomeKind(value["outcome"]), value["outcome_reason"], value["outcome_component"]),
                turn_rewards=value["turn_rewards"],
                num_turns=value["num_turns"],
                metrics=dict(value["metrics"]),
                extra=json.loads(value["extra"], object_hook=_bytes_from),
                data_source=value["data_source"],
                images=_images_from(value["images"], images),
            )
        )
    return trajectories


def _values_of(step: int, trajectory: Trajectory) -> dict[str, Any]:
    versions = np.concatenate([np.zeros(0, np.int32), *(one.version_spans[:, 0] for one in trajectory.segments)])
    return {
        "step": step,
        "episode": trajectory.episode_id,
        "task": trajectory.task_id,
        "data_source": trajectory.data_source,
        "reward": None if trajectory.reward is None else float(trajectory.reward),
        "outcome": str(trajectory.outcome.kind),
        "outcome_reason": trajectory.outcome.reason,
        "outcome_component": trajectory.outcome.component,
        "num_turns": trajectory.num_turns,
        "tokens": trajectory.num_sampled,
        "oldest_version": int(versions.min()) if len(versions) else None,
        "newest_version": int(versions.max()) if len(versions) else None,
    }


def _nested_of(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    written: set[str] = set()
    images = []
    for trajectory in trajectories:
        images.append(_images_to(trajectory.images, written))
        written |= trajectory.images.data.keys() if trajectory.images else set()
    rows: dict[str, list[Any]] = {
        "turn_rewards": [list(map(float, one.turn_rewards)) for one in trajectories],
        "metrics": [[(str(name), float(value)) for name, value in one.metrics.items()] for one in trajectories],
        "extra": [json.dumps(_with_text_keys(one.extra), default=_bytes_to) for one in trajectories],
        "images": images,
    }
    return {name: pa.array(rows[name], kind) for name, kind in NESTED.items()}


def _segments_of(segments: Sequence[Segment]) -> pa.StructArray:
    columns: dict[str, pa.Array] = {}
    for name in (*SEGMENT_FIELDS, *OPTIONAL_FIELDS):
        arrays = [getattr(segment, name) for segment in segments]
        if name in OPTIONAL_FIELDS and all(array is None for array in arrays):
            continue
        if name == "version_spans":
            columns[name] = _lists([len(array) for array in arrays], _spans_of(arrays))
            continue
        flat = [np.zeros(0, np.uint8) if array is None else array.reshape(-1) for array in arrays]
        kind = LISTS[name] or pa.from_numpy_dtype(max((one.dtype for one in flat), key=lambda one: one.itemsize))
        joined = np.concatenate(flat) if flat else np.zeros(0)
        values = pa.array(joined.astype(kind.to_pandas_dtype(), copy=False), kind)
        columns[name] = _lists([None if one is None else one.size for one in arrays], values)
        if name in SHAPED:
            columns[f"{name}_shape"] = pa.array(
                [one and list(one) for one in map(_shape, arrays)], pa.list_(pa.int32())
            )
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _shape(array: Any) -> Any:
    return None if array is None else array.shape


def _spans_of(spans: Sequence[Any]) -> pa.StructArray:
    joined = np.concatenate([np.zeros((0, 3), np.int32), *spans])
    return pa.StructArray.from_arrays([pa.array(joined[:, at], pa.int32()) for at in range(3)], list(SPAN))


def _lists(counts: Sequence[int | None], values: pa.Array) -> pa.LargeListArray:
    """Lists of `counts` values each, None for null. Large ones: routed experts of a step may be over 2^31 values."""
    sizes = np.array([count or 0 for count in counts], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    missing = np.array([*(count is None for count in counts), False])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64(), mask=missing), values)


def _segment_reader(structs: pa.StructArray) -> Callable[[int], Segment]:
    """Return the function that makes the segment at a place of `structs`."""
    readers: dict[str, Callable[[int], Any]] = {}
    for name in (*SEGMENT_FIELDS, *OPTIONAL_FIELDS):
        if structs.type.get_field_index(name) < 0:
            continue
        lists, shapes = structs.field(name), None
        values = lists.values
        if name == "version_spans":
            joined = np.stack([values.field(part).to_numpy() for part in SPAN], axis=1)
            joined.flags.writeable = False
        else:
            joined = values.to_numpy()
        if name in SHAPED:
            shapes = structs.field(f"{name}_shape").to_pylist()
        valid = lists.is_valid().to_numpy(zero_copy_only=False)
        readers[name] = partial(_cut, joined, lists.offsets.to_numpy(), valid, shapes)
    return lambda place: Segment(**{name: read(place) for name, read in readers.items()})


def _cut(joined: Any, offsets: Any, valid: Any, shapes: Any, place: int) -> Any:
    if not valid[place]:
        return None
    part = joined[offsets[place] : offsets[place + 1]]
    return part if shapes is None else part.reshape(shapes[place])


def _images_to(images: EpisodeImages | None, written: set[str]) -> dict[str, Any] | None:
    if images is None:
        return None
    return {
        "by_segment": [list(names) for names in images.by_segment],
        "data": [{"name": name, "bytes": None if name in written else data} for name, data in images.data.items()],
        "urls": list(images.urls.items()),
    }


def _images_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return row["images"]["data"] if row["images"] else []


def _images_from(plain: Mapping[str, Any] | None, data: Mapping[str, bytes]) -> EpisodeImages | None:
    if plain is None:
        return None
    return EpisodeImages(
        plain["by_segment"], {one["name"]: data[one["name"]] for one in plain["data"]}, dict(plain["urls"])
    )


def _with_text_keys(value: Any) -> Any:
    """The same with text in place of bytes as keys, which a payload may have and JSON has not."""
    if isinstance(value, Mapping):
        text = {key: key.decode("utf-8", "backslashreplace") for key in value if isinstance(key, bytes)}
        return {text.get(key, key): _with_text_keys(part) for key, part in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, list | tuple) else value


def _bytes_to(value: Any) -> Any:
    """Bytes in `extra`, which JSON has none of. Raises `TypeError` for what no payload holds."""
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _bytes_from(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["$bytes"]) if value.keys() == {"$bytes"} else value
