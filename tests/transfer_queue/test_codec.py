"""Round trips of everything that is stored, whole and by field; damage is named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_samples import LEASE, images_of, plain, same, segment, task, trajectories, trajectory, turn
from xxhash import xxh3_64_intdigest

from penstock.transfer_queue import (
    BadPayload,
    FieldValues,
    JournalEntry,
    JournalKind,
    QueueError,
    Task,
    Trajectory,
    decode_trajectory,
    encode_trajectory,
)
from penstock.transfer_queue.codec.columns import Column
from penstock.transfer_queue.codec.packing import (
    FORMAT,
    HEAD_GUESS,
    MAGIC,
    PREAMBLE,
    head_length,
    pack,
    parse_head,
    whole_head,
)
from penstock.transfer_queue.codec.trajectories import (
    KIND_TRAJECTORY,
    OPTIONAL_FIELDS,
    PLAIN_FIELDS,
    SEGMENT_FIELDS,
    decode_journal,
    decode_task,
    encode_journal,
    encode_task,
    outcome_from_plain,
    values_of,
    wanted_fields,
)

CODECS = st.sampled_from(["none", "zstd"])


def get_fields(blob: bytes, fields: Sequence[str]) -> FieldValues:
    """As a client of Redis reads some fields: the head, then their bytes."""
    head = whole_head(blob, KIND_TRAJECTORY)
    raws = {name: blob[slice(*head.fields[name].byte_range)] for name in wanted_fields(head, fields)}
    return values_of(head, raws, fields)


@settings(max_examples=60)
@given(trajectories, CODECS)
def test_trajectories_come_back_equal(sent: Trajectory, codec: str) -> None:
    assert same(decode_trajectory(encode_trajectory(sent, codec)), sent)


@settings(max_examples=40)
@given(trajectories, st.lists(st.binary(min_size=1, max_size=300), max_size=4), CODECS)
def test_images_come_back_and_leave_the_head_small(sent: Trajectory, images: list[bytes], codec: str) -> None:
    """Their bytes are a field of their own: who reads some fields does not read them."""
    shown = images_of(*(images for _ in sent.segments), elsewhere=b"x") if sent.segments else images_of([])
    with_images = replace(sent, images=shown)
    blob = encode_trajectory(with_images, codec)
    assert same(decode_trajectory(blob), with_images)
    assert len(shown.data) == len(set(images)) * bool(sent.segments)
    head = parse_head(blob, KIND_TRAJECTORY)
    assert head.fields["images"].shape == (sum(map(len, shown.data.values())),)
    assert get_fields(blob, ["reward"]).plain == {"reward": sent.reward}


def test_images_that_the_head_does_not_tell_are_refused() -> None:
    good = {field: None for field in PLAIN_FIELDS} | {"segments": 0, "outcome": ["completed", "", ""]}
    stored = [Column("images", "u1", np.zeros(3, np.uint8))]
    for told in (None, 7, [[["a", 2]], [], {}], [[["a", 9]], [], {}], [[["a", "b"]], [], {}]):
        with pytest.raises(BadPayload, match="images: "):
            decode_trajectory(pack(1, stored, good | {"images": told}).joined())


@settings(max_examples=60)
@given(st.data(), trajectories, CODECS)
def test_fields_equal_those_of_the_whole(data: st.DataObject, sent: Trajectory, codec: str) -> None:
    fields = data.draw(st.lists(st.sampled_from(SEGMENT_FIELDS + OPTIONAL_FIELDS + PLAIN_FIELDS), unique=True))
    assert same(get_fields(encode_trajectory(sent, codec), fields), expected(sent, fields))


def expected(sent: Trajectory, fields: list[str]) -> FieldValues:
    named = [name for name in fields if name in SEGMENT_FIELDS + OPTIONAL_FIELDS]
    segments = [{name: getattr(s, name) for name in named if getattr(s, name) is not None} for s in sent.segments]
    return FieldValues(
        sent.episode_id, {name: getattr(sent, name) for name in fields if name in PLAIN_FIELDS}, segments
    )


def test_an_unknown_field_is_refused_with_the_valid_ones() -> None:
    blob = encode_trajectory(trajectory(LEASE))
    for name in ("advantages", "segments", ""):
        with pytest.raises(
            QueueError, match=f"'{name}' is not a field of a trajectory; one of prompt_ids, .*data_source"
        ):
            get_fields(blob, ["response_mask", name])


def test_one_field_can_be_read_though_another_is_damaged() -> None:
    sent = trajectory(LEASE)
    raw = sent.segments[0].response_logprobs.tobytes()
    blob = encode_trajectory(sent)
    assert blob.count(raw) == 1
    damaged = blob.replace(raw, bytes(len(raw)))
    assert same(get_fields(damaged, ["response_mask"]), expected(sent, ["response_mask"]))
    for read in (decode_trajectory, lambda payload: get_fields(payload, ["response_logprobs"])):
        with pytest.raises(BadPayload, match=r"0\.response_logprobs: wrong checksum"):
            read(damaged)
    with pytest.raises(BadPayload, match="length"):
        get_fields(blob[:-1], ["response_ids"])


def test_the_head_of_a_megabyte_fits_the_first_read() -> None:
    long = encode_trajectory(replace(trajectory(LEASE), segments=[segment([0] * 60_000)]))
    assert len(long) > 1 << 20
    assert head_length(long[:HEAD_GUESS]) <= HEAD_GUESS


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "magic"),
        (4, b"\x63\x00", "format: version 99 is unknown"),
        (4, b"\x01\x00", "format: version 1 is unknown; this build reads version 2"),
        (6, b"\x02\x00", "kind"),
        (12, b"\x01", "head: reserved bytes are not 0"),
        (16, b"\x01", "length"),
        (PREAMBLE.size + 3, b"\xff", "head: wrong checksum"),
        (-1, b"\x07", r"0\.response_mask: wrong checksum"),
    ],
)
def test_the_damaged_part_is_named(at: int, value: bytes, message: str) -> None:
    blob = bytearray(encode_trajectory(replace(trajectory(LEASE), segments=[segment([0] * 7)])))
    start = at % len(blob)
    blob[start : start + len(value)] = value
    with pytest.raises(BadPayload, match=message):
        decode_trajectory(bytes(blob))


def sealed(kind: int, head: object) -> bytes:
    raw = msgpack.packb(head)
    preamble = PREAMBLE.pack(MAGIC, FORMAT, kind, len(raw), 0, 0, xxh3_64_intdigest(raw))
    return preamble + raw + bytes(-len(raw) % 8)


@settings(max_examples=200)
@given(st.sampled_from([*PLAIN_FIELDS, "segments", "other"]), plain, st.sampled_from([1, 2]))
def test_foreign_plain_data_is_refused_or_read_as_it_is(name: str, value: object, kind: int) -> None:
    """A head with a right checksum and any content: nothing but `BadPayload` comes out."""
    good = {field: None for field in PLAIN_FIELDS} | {"segments": 0, "outcome": ["completed", "", ""]}
    assert decode_trajectory(sealed(1, {"fields": [], "plain": good})).segments == []
    for changed in (good | {name: value}, {key: one for key, one in good.items() if key != name}):
        blob = sealed(kind, {"fields": [], "plain": changed})
        for read in (decode_trajectory, decode_journal, lambda payload: get_fields(payload, PLAIN_FIELDS)):
            with suppress(BadPayload):
                read(blob)


def test_a_trajectory_with_other_fields_is_refused() -> None:
    good = {field: None for field in PLAIN_FIELDS} | {"segments": 1, "outcome": ["completed", "", ""]}
    with pytest.raises(BadPayload, match="head: 0 fields for 1 segments"):
        decode_trajectory(sealed(1, {"fields": [], "plain": good}))
    lacking = [Column(f"0.{name}", "f4", []) for name in (*SEGMENT_FIELDS[1:], *OPTIONAL_FIELDS)]
    with pytest.raises(BadPayload, match="head: 9 fields for 1 segments"):
        decode_trajectory(pack(1, lacking, good).joined())
    foreign = pack(1, [Column(f"0.{name}", "f4", []) for name in SEGMENT_FIELDS], good).joined()
    with pytest.raises(BadPayload, match=r"head: field 0\.prompt_ids of dtype f4 is unknown"):
        decode_trajectory(foreign)
    del good["reward"]
    with pytest.raises(BadPayload, match="head: field reward is missing"):
        decode_trajectory(sealed(1, {"fields": [], "plain": good | {"segments": 0}}))
    with pytest.raises(BadPayload, match="outcome: 'exploded' is not a valid OutcomeKind"):
        outcome_from_plain(["exploded", "", ""])


# the format itself ----------------------------------------------------------------------------------------------------
GOLDEN = Path(__file__).parent / "golden"
WRITTEN = {
    "trajectory": (
        replace(trajectory(LEASE, version=3, tokens=4), turn_rewards=[0.5]),
        lambda sent: encode_trajectory(sent, "none"),
        decode_trajectory,
    ),
    "journal": (turn(3), encode_journal, decode_journal),
    "task": (replace(task(1), ground_truth={"by_number": {1: "one"}}), encode_task, decode_task),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_golden_files_are_written_and_read(name: str) -> None:
    """What these files hold lies in the Redis of runs that will be resumed: another format needs another `FORMAT`."""
    value, encode, decode = WRITTEN[name]
    golden = (GOLDEN / f"{name}-{FORMAT}.bin").read_bytes()
    assert bytes(encode(value)) == golden
    assert same(decode(golden), value)


# tasks and journals --------------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(st.dictionaries(st.text(), plain, max_size=3), plain, st.integers(-1000, 1000))
def test_tasks_come_back_equal(extra: dict, truth: object, priority: int) -> None:
    messages = [{"role": "user", "content": "hi"}]
    sent = Task("train/1", "train", messages, "d", truth, None, extra, {"top_p": 1.0}, 3, priority)
    assert decode_task(encode_task(sent)) == sent


def test_task_takes_any_mapping_and_names_bad_fields() -> None:
    nested = MappingProxyType({"a": np.float32(0.5), "b": np.arange(2)})
    sent = replace(task(1), extra_info=MappingProxyType({"nested": nested}))
    assert decode_task(encode_task(sent)).extra_info == {"nested": {"a": 0.5, "b": [0, 1]}}
    with pytest.raises(BadPayload, match="task train/0001: ground_truth: set"):
        encode_task(replace(task(1), ground_truth={1, 2}))


def test_task_too_deep_by_one_is_refused_whole() -> None:
    """Each field could be packed by itself."""
    deep: list[object] = []
    while fits(deep):
        deep = [deep]
    with pytest.raises(BadPayload, match="nested too deeply") as caught:
        encode_task(replace(task(1), ground_truth=deep))
    assert str(caught.value).startswith("task train/0001: ")
    assert "ground_truth" not in str(caught.value)


def fits(truth: object) -> bool:
    try:
        encode_task(replace(task(1), ground_truth=truth))
    except BadPayload:
        return False
    return True


def test_journal_entries_come_back_equal() -> None:
    entries = [turn(3), JournalEntry(JournalKind.TOOLS, data={"results": [{"text": "4"}], "sandbox_session": "s-1"})]
    assert all(same(decode_journal(encode_journal(entry)), entry) for entry in entries)
