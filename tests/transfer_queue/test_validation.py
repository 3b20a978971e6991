"""What is refused before a byte is sent, field by field, and what the index is told of what is accepted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_samples import LEASE, images_of, same, segment, segments, task, trajectories, trajectory

from penstock.transfer_queue import (
    COMPLETED,
    BadPayload,
    Outcome,
    OutcomeKind,
    QueueError,
    Segment,
    Task,
    Trajectory,
    check_segment,
    decode_trajectory,
    encode_trajectory,
)
from penstock.transfer_queue.validation import check_tasks, finish, is_reached, same_reward

GOOD = segment([0, 0, 1])  # four positions, three sampled


def i4(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def tops(**changes: Any) -> dict[str, Any]:
    """What a teacher may say of three sampled tokens, with `changes`."""
    made = {"ids": i4([1, 2], [3, 4], [5, 6]), "logprobs": np.full((3, 2), -2.0, np.float32)} | changes
    named = {f"teacher_top_{name}": values for name, values in made.items()}
    return {"teacher_logprobs": np.zeros(4, np.float32), **named}


@settings(max_examples=60)
@given(trajectories)
def test_finish_accepts_what_an_engine_makes(sent: Trajectory) -> None:
    result = finish(LEASE, sent)
    assert same(decode_trajectory(result.packed.joined()), sent)
    assert result.reward == sent.reward
    assert result.tokens == sum(len(one.response_ids) for one in sent.segments)
    assert result.lowest_version == sent.min_version
    assert result.highest_version == max((one.versions().max(initial=0) for one in sent.segments), default=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by_segment": []}, "images.by_segment: names images of 0 segments, there are 1"),
        ({"by_segment": [["a"]]}, "images: '.*' is named or given, not both"),
        ({"data": {}}, "images: '.*' is named or given"),
        ({"data": {"a": b"other"}, "by_segment": [["a"]]}, "images.data: a is not the sha256 of its bytes"),
        ({"data": {"a": "text"}, "by_segment": [["a"]]}, "images.data: a is str, bytes expected"),
        (
            {"urls": dict.fromkeys(images_of([b"picture"]).data, "file:///a.png")},
            "images.urls: one is of an image that",
        ),
    ],
)
def test_images_that_are_not_what_they_say_are_refused(changes: dict[str, Any], message: str) -> None:
    shown = images_of([b"picture"])
    finish(LEASE, replace(trajectory(LEASE), images=shown))
    with pytest.raises(BadPayload, match=message):
        finish(LEASE, replace(trajectory(LEASE), images=replace(shown, **changes)))


def test_compression_reaches_the_payload() -> None:
    long = replace(trajectory(LEASE), segments=[segment([0] * 5_000)])
    assert (
        finish(LEASE, long, compression="zstd").packed.joined()
        == encode_trajectory(long, "zstd")
        != finish(LEASE, long).packed.joined()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": np.array([1, 1], dtype=np.uint8)}, "response_mask: shape"),
        ({"response_mask": np.array([1, 1, 2, 0], dtype=np.uint8)}, "response_mask: holds other values"),
        ({"response_mask": np.array([1, 1, 0.5, 0])}, "response_mask: holds other values"),
        ({"response_mask": np.array(["1", "1", "1", "0"])}, "response_mask: dtype"),
        ({"response_logprobs": np.zeros(5, dtype=np.float32)}, "response_logprobs: shape"),
        ({"response_logprobs": np.array([0, np.inf, 0, 0], dtype=np.float32)}, "response_logprobs: holds NaN"),
        ({"response_logprobs": np.array([0, -np.inf, np.inf, 0], dtype=np.float32)}, "response_logprobs: holds NaN"),
        ({"response_logprobs": np.array([0, np.nan, 0, 0], dtype=np.float32)}, "response_logprobs: holds NaN"),
        ({"response_logprobs": np.array([0, -1e300, 0, 0])}, "response_logprobs: holds NaN"),
        ({"response_logprobs": np.array(["a", "b", "c", "d"])}, "response_logprobs: dtype"),
        ({"teacher_logprobs": np.zeros(3, dtype=np.float32)}, "teacher_logprobs: shape"),
        ({"teacher_logprobs": np.array([0, np.nan, 0, 0], dtype=np.float32)}, "teacher_logprobs: holds NaN"),
        ({"routed_experts": np.zeros((3, 2, 2), dtype=np.uint8)}, "routed_experts: shape"),
        ({"routed_experts": np.zeros((5, 2, 1), dtype=np.uint8)}, "routed_experts: shape"),
        ({"routed_experts": np.zeros((5, 2), dtype=np.uint8)}, "routed_experts: shape"),
        ({"routed_experts": np.zeros((5, 2, 2), dtype=np.int32)}, "routed_experts: dtype int32"),
        (tops(ids=i4([1, 2], [3, 4])), r"teacher_top_ids: shape \(2, 2\), not \[3, k\]"),
        (tops(ids=np.zeros((3, 0), np.int32)), r"teacher_top_ids: shape \(3, 0\)"),
        (tops(ids=i4(1, 2, 3)), r"teacher_top_ids: shape \(3,\)"),
        (tops() | {"teacher_logprobs": None}, "teacher_top_ids: there are no teacher_logprobs"),
        (tops(ids=None), r"teacher_top_ids: shape \(\)"),
        (tops(ids=i4([1, 2], [3, -1], [5, 6])), "teacher_top_ids: holds negative"),
        (tops(ids=i4([1, 2], [3, 3], [5, 6])), "teacher_top_ids: holds an id twice"),
        (tops(ids=np.zeros((3, 2))), "teacher_top_ids: dtype float64"),
        (tops(logprobs=None), r"teacher_top_logprobs: shape \(\)"),
        (tops(logprobs=np.zeros((3, 2), np.int32)), "teacher_top_logprobs: dtype int32"),
        (tops(logprobs=np.zeros((3, 1), np.float32)), r"teacher_top_logprobs: shape \(3, 1\)"),
        (tops(logprobs=np.full((3, 2), np.nan, np.float32)), "teacher_top_logprobs: holds NaN"),
        (tops(logprobs=np.full((3, 2), -0.1, np.float32)), r"teacher_top_logprobs: probabilities .* sum to 1\.81"),
        (tops(logprobs=np.full((3, 2), 1e9, np.float32)), "teacher_top_logprobs: probabilities"),
        ({"response_ids": i4(1, -2, 3, 4)}, "response_ids: holds negative"),
        ({"response_ids": np.array([1, 2**31, 3, 4])}, "response_ids: holds values over int32"),
        ({"response_ids": np.array([1, 2**31, 3, 4], dtype=np.uint32)}, "response_ids: holds values over int32"),
        ({"prompt_ids": np.array([0.5])}, "prompt_ids: dtype"),
        ({"prompt_ids": i4()}, "prompt_ids: is empty"),
        ({"prompt_ids": np.zeros((2, 2), dtype=np.int32)}, "prompt_ids: has 2 dimensions"),
        ({"turn_starts": i4(9)}, "turn_starts: points behind"),
        ({"turn_starts": np.array([9])}, "turn_starts: points behind"),
        ({"turn_starts": i4(-1)}, "turn_starts: holds negative"),
        ({"turn_starts": i4(2, 1)}, "turn_starts: is not in order"),
        ({"version_spans": i4([0, 0, 2])}, "version_spans: response position 2"),
        ({"version_spans": np.array([[0, 0, 2]])}, "version_spans: response position 2"),
        ({"version_spans": i4([0, 0, 4])}, "version_spans: response position 3"),
        ({"version_spans": i4([0, 0, 3], [1, 2, 3])}, "covered by 2 spans"),
        ({"version_spans": i4([0, 0, 2], [0, 1, 2])}, "covered by 2 spans"),
        ({"version_spans": i4([0, 0, 1], [0, 2, 4])}, "response position 1"),
        ({"version_spans": np.zeros((0, 3), dtype=np.int32)}, "version_spans: response position 0"),
        ({"version_spans": i4([-1, 0, 3])}, "version -1 is negative"),
        ({"version_spans": i4([0, 0, 9])}, "span 0 to 9 of version 0 is outside"),
        ({"version_spans": i4([0, 0, 3], [0, 3, 3])}, "span 3 to 3 of version 0 is outside"),
        ({"version_spans": np.zeros((3, 2), dtype=np.int32)}, "version_spans: shape"),
        ({"version_spans": np.array([[2**31, 0, 3]])}, "version_spans: holds values over int32"),
        ({"version_spans": np.array([[0.0, 0.0, 3.0]])}, "version_spans: dtype"),
    ],
)
def test_bad_segments_are_refused_by_field(change: dict, message: str) -> None:
    check_segment(GOOD, 0, "segments[0]")
    check_segment(replace(GOOD, **tops()), 0, "segments[0]")
    with pytest.raises(BadPayload, match=r"segments\[0\]\." + message if ":" in message else message):
        check_segment(replace(GOOD, **change), 0, "segments[0]")


def test_other_dtypes_and_span_orders_are_as_good() -> None:
    wide = Segment(
        GOOD.prompt_ids.astype(np.int64),
        GOOD.response_ids.tolist(),  # type: ignore[arg-type]
        GOOD.response_mask.astype(bool),  # type: ignore[arg-type]
        GOOD.response_logprobs.astype(np.float64),
        GOOD.version_spans[::-1].astype(np.uint64),
        [],  # type: ignore[arg-type]
    )
    sent = replace(trajectory(LEASE), segments=[wide])
    result = finish(LEASE, sent)
    assert (result.tokens, result.lowest_version, result.highest_version) == (4, 0, 1)
    found = decode_trajectory(result.packed.joined()).segments[0]
    want = replace(GOOD, version_spans=GOOD.version_spans[::-1], turn_starts=i4())
    assert same(found, want)


def test_a_span_per_token_is_checked() -> None:
    long = segment([0] * 5_000)
    check_segment(long, 0, "s")
    spans = long.version_spans.copy()
    spans[4_000, 1] = 3_999
    with pytest.raises(BadPayload, match=r"response position 3999 .* covered by 2 spans"):
        check_segment(replace(long, version_spans=spans), 0, "s")


@st.composite
def perhaps_bad(draw: st.DrawFn) -> Segment:
    """A segment of an engine with some of its numbers changed."""
    found = draw(segments())
    given = {name: getattr(found, name) for name in Segment.__dataclass_fields__}
    arrays = {name: values.copy() for name, values in given.items() if values is not None}
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), max_size=2)):
        values = arrays[name].reshape(-1)
        if values.size:
            at = draw(st.integers(0, values.size - 1))
            odd = [0, 1, 2, 255] if values.dtype.kind == "u" else [-1, 0, 1, 2, 3, len(found.response_ids), 2**31 - 128]
            values[at] = draw(st.sampled_from([*odd, np.nan, np.inf] if values.dtype == np.float32 else odd))
    return Segment(**arrays)


EDGES: dict[str, dict[str, Any]] = {
    "ids": {"prompt_ids": i4(0, 2**31 - 1), "response_ids": i4(0, 2**31 - 1, 0, 0)},
    "turns": {"turn_starts": i4(0, 0, 4, 4)},
    "no_turns": {"turn_starts": i4()},
    "teacher": {"teacher_logprobs": np.zeros(4, np.float32)},
    "tops": tops(),
    "one_top": tops(ids=i4([0], [0], [2**31 - 1]), logprobs=np.zeros((3, 1), np.float32)),
    "tops_of_all": tops(logprobs=np.full((3, 2), np.log(0.504), np.float32)),
    "experts": {"routed_experts": np.zeros((7, 1, 2), np.uint8)},
    "many_experts": {"routed_experts": np.zeros((7, 3, 4), np.uint16)},
    "nothing": {
        **{"response_ids": i4(), "response_mask": np.zeros(0, np.uint8), "turn_starts": i4(0)},
        **{"response_logprobs": np.zeros(0, np.float32), "version_spans": np.zeros((0, 3), np.int32)},
    },
}


def test_the_floor_of_a_lease_may_be_sampled_at() -> None:
    at_floor = segment([3, 3, 4])
    check_segment(at_floor, 3, "s")
    with pytest.raises(BadPayload, match=r"s\.version_spans: version 3 is below the lease's floor 4"):
        check_segment(at_floor, 4, "s")


@pytest.mark.parametrize("edge", EDGES)
def test_what_just_holds_is_taken(edge: str) -> None:
    check_segment(replace(GOOD, **EDGES[edge]), 0, "s")


def test_a_span_that_covers_a_token_257_times_is_refused() -> None:
    with pytest.raises(BadPayload, match="response position 0"):
        check_segment(replace(GOOD, version_spans=i4(*[[0, 0, 3]] * 257)), 0, "s")


def holds(found: Segment, floor: int) -> bool:
    """The rules position by position."""
    length, tops_given = len(found.response_ids), found.teacher_top_ids
    spans, turns = found.version_spans.tolist(), found.turn_starts.tolist()
    covered = [sum(start <= at < end for _, start, end in spans) for at in range(length)]
    logprobs = (found.response_logprobs, found.teacher_logprobs, found.teacher_top_logprobs)
    rules = [
        all(token >= 0 for token in [*found.prompt_ids.tolist(), *found.response_ids.tolist()]),
        all(np.isfinite(values).all() for values in logprobs if values is not None),
        len(found.prompt_ids) > 0 or found.response_mask[:1].tolist() != [1],
        covered == found.response_mask.tolist(),
        all(0 <= start < end <= length and version >= max(floor, 0) for version, start, end in spans),
        turns == sorted(turns) and all(0 <= at <= length for at in turns),
    ]
    if tops_given is not None and found.teacher_top_logprobs is not None:
        rules += [min(row) >= 0 and len(set(row)) == len(row) for row in tops_given.tolist()]
        rules += [sum(math.exp(min(one, 1.0)) for one in row) <= 1.01 for row in found.teacher_top_logprobs.tolist()]
    return all(rules)


@settings(max_examples=300)
@given(perhaps_bad(), st.integers(-1, 3))
def test_segments_are_judged_as_position_by_position(found: Segment, floor: int) -> None:
    assert (verdict(found, floor) is None) == holds(found, floor)


def verdict(found: Segment, floor: int) -> str | None:
    try:
        check_segment(found, floor, "s")
    except BadPayload as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": float("nan")}, "reward: nan is not finite"),
        ({"turn_rewards": (float("nan"),)}, "turn_rewards: nan is not finite"),
        ({"turn_rewards": (10**400,)}, "turn_rewards: 1000"),
        ({"turn_rewards": (1.0, 0.0)}, "turn_rewards: 2 for 1 turns"),
        ({"extra": {"turn_states": ["a", "b"]}}, "extra.turn_states: 2 for 1 turns"),
        ({"extra": {"turn_states": "a"}}, "extra.turn_states: str, a list expected"),
        ({"metrics": {"f1": None}}, r"metrics\['f1'\]: None is not a number"),
        ({"reward": "1"}, "reward: '1' is not finite"),
        ({"reward": 10**400}, "reward: 1000.* is not finite"),
        ({"outcome": Outcome(OutcomeKind.CANCELLED)}, "reward: cancelled may not carry one"),
        ({"outcome": Outcome(OutcomeKind.INFRA_ERROR)}, "reward: infra_error may not carry one"),
        ({"episode_id": "train/0002#0"}, "episode_id"),
        ({"task_id": "train/0002"}, "task_id"),
        ({"extra": {"x": {1, 2}}}, r"extra\.x: set"),
    ],
)
def test_bad_trajectories_are_refused_by_field(change: dict, message: str) -> None:
    assert trajectory(LEASE).outcome == COMPLETED
    with pytest.raises(BadPayload, match=message):
        finish(LEASE, replace(trajectory(LEASE), **change))


def test_finish_refuses_old_tokens_and_large_payloads() -> None:
    with pytest.raises(BadPayload, match="version 2 is below the lease's floor 3"):
        finish(replace(LEASE, min_version=3), trajectory(LEASE, version=2))
    with pytest.raises(BadPayload, match="over the limit of 100"):
        finish(LEASE, trajectory(LEASE), max_bytes=100)
    size = len(encode_trajectory(trajectory(LEASE)))
    assert finish(LEASE, trajectory(LEASE), max_bytes=size).packed.size == size
    with pytest.raises(BadPayload, match=f"payload of train/0001#0: {size} bytes, over the limit of {size - 1}"):
        finish(LEASE, trajectory(LEASE), max_bytes=size - 1)


def test_finish_of_nothing_sampled_names_no_version() -> None:
    none = replace(trajectory(LEASE), segments=[], reward=1)
    result = finish(LEASE, none)
    assert (result.reward, result.tokens, result.lowest_version, result.highest_version) == (1.0, 0, None, 0)
    assert type(result.reward) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_id": ""}, "task_id must be 1 to 200"),
        ({"task_id": "a b"}, "task_id must be 1 to 200"),
        ({"task_id": "a\n"}, "task_id must be 1 to 200"),
        ({"task_id": "a" * 201}, "task_id must be 1 to 200"),
        ({"split": "eval 4"}, "split must be 1 to 200"),
        ({"data_source": "x" * 201}, "task train/0001: data_source must be at most 200 printable"),
        ({"data_source": "two\nlines"}, "data_source must be"),
        ({"data_source": None}, "data_source must be"),
        ({"priority": 1001}, "task train/0001: priority is 1001, not a whole number from -1000 to 1000"),
        ({"priority": -1001}, "priority is -1001"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"min_version": -1}, "task train/0001: min_version is -1, below 0"),
        *(({"group_size": size}, "task train/0001: group_size is") for size in (0, -1, 1.5, "2")),
    ],
)
def test_tasks_that_the_queue_cannot_keep_are_refused(change: dict, message: str) -> None:
    good: list[Task] = [task(1), task(2, source="Größe 3/α", priority=-1000), task(3, source="", priority=1000)]
    good += [replace(task(4), task_id="!" + "~" * 199), task(5, source="x" * 200, group_size=1)]
    check_tasks(good)
    with pytest.raises(QueueError, match=message):
        check_tasks([*good, replace(task(1), **change)])


def test_sums_of_floats_reach_what_they_are_a_sum_of() -> None:
    rounded = 0.7 + 0.2 + 0.1
    assert rounded < 1.0
    assert is_reached(rounded, 1.0)
    assert same_reward(1.0, rounded)
    assert is_reached(1.5, 1.0)
    assert not is_reached(0.999, 1.0)
    assert not same_reward(1.001, 1.0)
    assert not same_reward(None, 1.0)
