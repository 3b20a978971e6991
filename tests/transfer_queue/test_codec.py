"""Round trips of everything that is stored, and what is refused, field by field."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_samples import segment, task, trajectory, turn

from penstock.transfer_queue.checks import check_segment, finish
from penstock.transfer_queue.codec import (
    decode_journal,
    decode_task,
    decode_trajectory,
    encode_journal,
    encode_task,
    encode_trajectory,
)
from penstock.transfer_queue.ledger import BadPayload, Lease
from penstock.transfer_queue.packing import PREAMBLE
from penstock.transfer_queue.trajectory import (
    COMPLETED,
    JournalEntry,
    JournalKind,
    Outcome,
    OutcomeKind,
    Segment,
    Task,
    Trajectory,
)

LEASE = Lease("train/0001#0", task(1), 0, 0, 1, 0)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Any segment that an engine could have made: turns of sampled tokens with observations between them."""
    mask: list[int] = []
    spans, starts, version = [], [], 0
    for sampled, observed in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5)):
        starts.append(len(mask))
        if sampled:
            version += draw(st.integers(0, 2))
            spans.append((version, len(mask), len(mask) + sampled))
        mask += [1] * sampled + [0] * observed
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return Segment(
        prompt_ids=rng.integers(0, 2**31, draw(st.integers(0, 9)), dtype=np.int32),
        response_ids=rng.integers(0, 2**31, len(mask), dtype=np.int32),
        response_mask=np.array(mask, dtype=np.uint8),
        response_logprobs=(-rng.random(len(mask)) * np.array(mask)).astype(np.float32),
        version_spans=np.array(spans, dtype=np.int32).reshape(-1, 3),
        turn_starts=np.array(starts, dtype=np.int32),
    )


trajectories = st.builds(
    Trajectory,
    episode_id=st.just(LEASE.episode_id),
    task_id=st.just(LEASE.task.task_id),
    segments=st.lists(segments(), max_size=3),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    outcome=st.builds(Outcome, st.just(OutcomeKind.TRUNCATED), st.text()),
    turn_rewards=st.lists(st.floats(allow_nan=False), max_size=3),
    num_turns=st.integers(0, 9),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    extra=st.dictionaries(st.text(), plain, max_size=3),
    data_source=st.text(),
)


def same(left: object, right: object) -> bool:
    """Equality of two dataclasses with arrays, dtypes included."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))  # type: ignore[arg-type]
    if isinstance(left, list) and left and hasattr(left[0], "__dataclass_fields__"):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=60, deadline=None)
@given(trajectories)
def test_trajectories_come_back_equal_and_pass_the_checks(sent: Trajectory) -> None:
    result = finish(LEASE, sent)
    assert same(decode_trajectory(result.blob), sent)
    assert result.lowest_version == sent.min_version


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), plain, max_size=3), plain)
def test_tasks_come_back_equal(extra: dict, truth: object) -> None:
    sent = Task("train/1", "train", [{"role": "user", "content": "hi"}], "d", truth, None, extra, {"top_p": 1.0}, 3)
    assert decode_task(encode_task(sent)) == sent


def test_journal_entries_come_back_equal() -> None:
    entries = [turn(3), JournalEntry(JournalKind.TOOLS, data={"results": [{"text": "4"}], "sandbox_session": "s-1"})]
    assert all(same(decode_journal(encode_journal(entry)), entry) for entry in entries)


def test_arrays_are_packed_not_spelled_out() -> None:
    long = replace(trajectory(LEASE), segments=[segment([0] * 100_000)])
    assert len(encode_trajectory(long)) < 100_000 * (4 + 1 + 4 + 12) + 2_000


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    """One flipped bit anywhere, padding apart, is an error; so is any cut."""
    blob = encode_trajectory(trajectory(LEASE))
    at = data.draw(st.integers(0, len(blob) - 1))
    damaged = bytearray(blob)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(BadPayload):
        assert same(decode_trajectory(bytes(damaged)), decode_trajectory(blob))  # padding or a reserved byte
    with pytest.raises(BadPayload):
        decode_trajectory(blob[:at])


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "magic"),
        (4, b"\x63\x00", "format: version 99 is unknown"),
        (6, b"\x02\x00", "kind"),
        (PREAMBLE.size + 3, b"\xff", "head: wrong checksum"),
        (-1, b"\x07", None),
    ],
)
def test_the_damaged_part_is_named(at: int, value: bytes, message: str | None) -> None:
    blob = bytearray(encode_trajectory(replace(trajectory(LEASE), segments=[segment([0] * 7)])))
    start = at % len(blob)
    blob[start : start + len(value)] = value
    if message is None:
        decode_trajectory(bytes(blob))
        return
    with pytest.raises(BadPayload, match=message):
        decode_trajectory(bytes(blob))


def test_a_damaged_field_is_named() -> None:
    sent = trajectory(LEASE)
    blob = encode_trajectory(sent)
    raw = sent.segments[0].response_logprobs.tobytes()
    assert blob.count(raw) == 1
    with pytest.raises(BadPayload, match=r"0\.response_logprobs: wrong checksum"):
        decode_trajectory(blob.replace(raw, bytes(len(raw))))


GOOD = segment([0, 0, 1])  # four positions, three sampled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": np.array([1, 1], dtype=np.uint8)}, "response_mask: shape"),
        ({"response_mask": np.array([1, 1, 2, 0], dtype=np.uint8)}, "response_mask: holds other values"),
        ({"response_logprobs": np.zeros(5, dtype=np.float32)}, "response_logprobs: shape"),
        ({"response_logprobs": np.array([0, np.inf, 0, 0], dtype=np.float32)}, "response_logprobs: holds NaN"),
        ({"response_ids": np.array([1, -2, 3, 4], dtype=np.int32)}, "response_ids: holds negative"),
        ({"prompt_ids": np.array([0.5])}, "prompt_ids: dtype"),
        ({"prompt_ids": np.zeros((2, 2), dtype=np.int32)}, "prompt_ids: has 2 dimensions"),
        ({"turn_starts": np.array([9], dtype=np.int32)}, "turn_starts: points behind"),
        ({"turn_starts": np.array([2, 1], dtype=np.int32)}, "turn_starts: is not in order"),
        ({"version_spans": np.array([[0, 0, 2]], dtype=np.int32)}, "version_spans: response position 2"),
        ({"version_spans": np.array([[0, 0, 4]], dtype=np.int32)}, "version_spans: response position 3"),
        ({"version_spans": np.array([[0, 0, 3], [1, 2, 3]], dtype=np.int32)}, "covered by 2 spans"),
        ({"version_spans": np.array([[-1, 0, 3]], dtype=np.int32)}, "version -1 is negative"),
        ({"version_spans": np.array([[0, 0, 9]], dtype=np.int32)}, "span 0 to 9 of version 0 is outside"),
        ({"version_spans": np.zeros((3, 2), dtype=np.int32)}, "version_spans: shape"),
    ],
)
def test_bad_segments_are_refused_by_field(change: dict, message: str) -> None:
    check_segment(GOOD, 0, "segments[0]")
    with pytest.raises(BadPayload, match=message):
        check_segment(replace(GOOD, **change), 0, "segments[0]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": float("nan")}, "reward: nan is not finite"),
        ({"outcome": Outcome(OutcomeKind.CANCELLED)}, "reward: cancelled may not carry one"),
        ({"episode_id": "train/0002#0"}, "episode_id"),
        ({"task_id": "train/0002"}, "task_id"),
        ({"extra": {"x": {1, 2}}}, "plain data: set"),
    ],
)
def test_bad_trajectories_are_refused_by_field(change: dict, message: str) -> None:
    assert trajectory(LEASE).outcome == COMPLETED
    with pytest.raises(BadPayload, match=message):
        finish(LEASE, replace(trajectory(LEASE), **change))


def test_tokens_below_the_floor_and_payloads_over_the_limit_are_refused() -> None:
    with pytest.raises(BadPayload, match="version 2 is below the lease's floor 3"):
        finish(replace(LEASE, min_version=3), trajectory(LEASE, version=2))
    with pytest.raises(BadPayload, match="over the limit of 100"):
        finish(LEASE, trajectory(LEASE), max_bytes=100)
