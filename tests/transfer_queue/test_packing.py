"""The container: every array comes back equal, and any damage is refused, whatever its bytes say."""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from queue_samples import plain, same
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from penstock.transfer_queue import BadPayload, QueueError
from penstock.transfer_queue.codec.columns import BLOCK, DTYPES, MAX_RAW_BYTES, Column
from penstock.transfer_queue.codec.packing import (
    FORMAT,
    HEAD_GUESS,
    MAGIC,
    PREAMBLE,
    head_length,
    pack,
    parse_head,
    read_arrays,
    whole_head,
)

KIND = 7
CODECS = st.sampled_from(["none", "zstd"])


@st.composite
def columns(draw: st.DrawFn) -> list[Column]:
    """Arrays of all dtypes, empty ones and ones of several blocks among them, half of them worth compressing."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        rows = draw(st.sampled_from([0, 1, 5, 300, 20_000, 65_536, 65_537, 70_001]))
        shape = (rows,) if draw(st.booleans()) else (rows, 3)
        values = np.random.default_rng(number).integers(0, draw(st.sampled_from([3, 256])), shape)
        found.append(Column(f"field {number}", dtype, values.astype(DTYPES[dtype]), draw(st.booleans())))
    return found


LONG = [
    Column("mask", "u1", np.arange(150_001) % 7 % 2, sliced=True),
    Column("ids", "i4", np.arange(150_001), sliced=True),
    Column("spans", "i4", np.arange(30_000).reshape(-1, 3), sliced=True),
    Column("prompt", "i4", np.arange(40_000)),
]


def whole(blob: bytes) -> tuple[dict[str, Any], Any]:
    head = whole_head(blob, KIND)
    return read_arrays(head, blob), head.plain


def sealed(head: Any, body: bytes = b"", packed: bytes | None = None) -> bytes:
    """A payload whose checksum of the head is right, whatever the head says."""
    raw = msgpack.packb(head) if packed is None else packed
    preamble = PREAMBLE.pack(MAGIC, FORMAT, KIND, len(raw), 0, len(body), xxh3_64_intdigest(raw))
    return preamble + raw + bytes(-len(raw) % 8) + body


@settings(max_examples=60)
@given(columns(), st.dictionaries(st.text(), plain, max_size=3), CODECS)
def test_arrays_and_plain_data_come_back_equal(sent: list[Column], extra: dict, codec: str) -> None:
    blob = pack(KIND, sent, extra, codec).joined()
    arrays, found = whole(blob)
    assert same({column.name: column.values for column in sent}, arrays)
    assert found == extra
    assert head_length(blob[: PREAMBLE.size]) == head_length(blob)


def test_fields_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transfer_queue.codec.packing.MAX_RAW_BYTES", 100)
    sent = [Column("a", "u1", np.zeros(40)), Column("b", "i4", np.zeros(15))]
    assert list(whole(pack(KIND, sent, {}).joined())[0]) == ["b", "a"]
    with pytest.raises(BadPayload, match="fields: 101 bytes unpacked, over the limit of 100"):
        pack(KIND, [*sent, Column("c", "u1", [0])], {})


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_field_is_read_from_its_own_bytes(codec: str) -> None:
    """The head alone says where they are; an array that is not compressed is a view of them."""
    blob = pack(KIND, LONG, {}, codec).joined()
    head = parse_head(blob[: head_length(blob[:HEAD_GUESS])], KIND)
    for column in LONG:
        field = head.fields[column.name]
        raw = np.frombuffer(blob, np.uint8)[slice(*field.byte_range)]
        values = field.decode(raw.data)
        assert values.dtype == DTYPES[column.dtype]
        assert np.array_equal(values, column.values)
        assert (np.shares_memory(raw, values), values.flags.writeable) == (field.codec == "none", False)
        assert values.flags.aligned
        with pytest.raises(BadPayload, match=rf"{column.name}: \d+ bytes, \d+ by the head; the payload is truncated"):
            field.decode(raw.data[:-1])


def test_damage_of_one_field_is_not_that_of_another() -> None:
    blob = bytearray(pack(KIND, LONG, {}).joined())
    fields = parse_head(bytes(blob), KIND).fields
    blob[fields["ids"].start + 2 * BLOCK + 5] ^= 1
    assert fields["mask"].decode(memoryview(blob)[slice(*fields["mask"].byte_range)])[1] == 1
    with pytest.raises(BadPayload, match="ids: wrong checksum"):
        fields["ids"].decode(memoryview(blob)[slice(*fields["ids"].byte_range)])


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_flipped_bit_and_every_cut_is_refused(codec: str) -> None:
    """Exhaustive: no byte of a payload is unprotected, padding and reserved ones included."""
    sent = [Column("a", "u1", np.arange(13)), Column("b", "f4", np.ones(300)), Column("c", "i4", np.zeros((0, 3)))]
    blob = pack(KIND, sent, {"name": "x"}, codec).joined()
    assert len(blob) % 4 != 0
    assert whole(blob)[1] == {"name": "x"}
    for at in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[at] ^= 1 << bit
            with pytest.raises(BadPayload):
                whole(bytes(damaged))
        with pytest.raises(BadPayload):
            whole(blob[:at])
    with pytest.raises(BadPayload, match="length"):
        whole(blob + b"\0")


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(PREAMBLE.pack(MAGIC, FORMAT, KIND, 2**32 - 1, 0, 2**64 - 1, 0))
@example(PREAMBLE.pack(MAGIC, FORMAT, KIND, 0, 0, 0, xxh3_64_intdigest(b"")))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    for blob in (junk, MAGIC + struct.pack("<HH", FORMAT, KIND) + junk, sealed(None, packed=junk)):
        with pytest.raises(BadPayload):
            whole(blob)
        with suppress(BadPayload):
            assert head_length(blob) >= PREAMBLE.size


odd = plain | st.binary(max_size=20) | st.sampled_from([-1, 2**63, 2**40, True, [2**30, 2**30], [], [0, 2**30], [-1]])


@settings(max_examples=300)
@given(st.integers(0, 6), odd, st.binary(max_size=64))
def test_a_table_with_a_right_checksum_and_wrong_rows_is_refused(place: int, value: object, body: bytes) -> None:
    """Whoever can write the store can seal any head: a reader allocates and believes nothing that does not fit."""
    row: list[Any] = ["a", "i4", [4], 16, "none", 16, xxh3_64_digest(bytes(16))]
    good = sealed({"fields": [row], "plain": {}}, bytes(16))
    assert whole(good)[0]["a"].tolist() == [0, 0, 0, 0]
    changed = [*row[:place], value, *row[place + 1 :]]
    for head in (
        {"fields": [changed], "plain": {}},
        {"fields": value, "plain": {}},
        {"fields": [], "plain": value},
        value,
    ):
        with suppress(BadPayload):
            arrays, _ = whole(sealed(head, body))
            assert isinstance(value, dict | list | str)  # plain data, no field, or another name of the field
            assert all(values.nbytes <= len(body) for values in arrays.values())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a", "f8", [2], 16, "none", 16, bytes(8)], "a: dtype 'f8' is unknown"),
        (["a", "i4", [4], 16, "lz4", 16, bytes(8)], "a: codec 'lz4' is unknown"),
        (["a", "i4", [5], 16, "none", 16, bytes(8)], "a: 16 stored bytes do not hold shape"),
        (["a", "i4", [-1, -1], 16, "none", 16, bytes(8)], "a: shape"),
        (["a", "i4", [2, 2, 1, 1], 16, "none", 16, bytes(8)], "a: shape"),
        (["a", "i4", [4], 16, "none", 4, bytes(8)], "a: 8 bytes of checksums for 4 blocks"),
        (["a", "i4", [4], 16, "none", 0, bytes(8)], "a: blocks of 0 bytes"),
        (["a", "i4", [4], 16, "none", 17, bytes(8)], "a: blocks of 17 bytes"),
        (["a", "i4", [4], 16, "none", 16], "head: malformed row"),
        (["a", "i4", [2**29], 16, "zstd", 16, bytes(8)], f"over the limit of {MAX_RAW_BYTES}"),
        (["a", "u1", [2**30], 16, "zstd", 16, bytes(8)], "a: wrong checksum"),
        (["a", "u1", [2**30 + 1], 16, "zstd", 16, bytes(8)], "a: shape"),
        (["a", "u1", [99], 16, "zstd", 8, bytes(16)], "a: blocks of 8 bytes do not fit 16"),
        (["a", "u1", [99], -1, "zstd", -1, b""], "a: -1 stored bytes"),
        (["a", "i4", [2], 8, "none", 8, bytes(8)], "length: a body of 16 bytes, its fields have 8"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row: list[Any], message: str) -> None:
    with pytest.raises(BadPayload, match=message):
        whole(sealed({"fields": [row], "plain": {}}, bytes(16)))


def test_two_fields_of_one_name_and_foreign_heads_are_refused() -> None:
    row = ["a", "i4", [4], 16, "none", 16, xxh3_64_digest(bytes(16))]
    with pytest.raises(BadPayload, match="two fields have one name"):
        whole(sealed({"fields": [row, row], "plain": {}}, bytes(32)))
    with pytest.raises(BadPayload, match="not a map of fields and plain data"):
        whole(sealed({"fields": [row]}, bytes(16)))


@pytest.mark.parametrize(
    ("values", "message"),
    [(["a"], "a: "), (np.float32(1), "a: has 0 dimensions"), (np.zeros((1, 1, 1, 1)), "a: has 4 dimensions")],
)
def test_what_is_no_array_is_not_packed(values: Any, message: str) -> None:
    with pytest.raises(BadPayload, match=message):
        pack(KIND, [Column("a", "f4", values)], {})


# zstd ----------------------------------------------------------------------------------------------------------------
def test_zstd_is_kept_only_where_it_is_smaller() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 10_000)
    sent = [
        Column("noise", "u1", noise, sliced=True),
        Column("zeros", "u1", np.zeros(90_000)),
        Column("few", "u1", [0]),
        Column("enough", "u1", np.zeros(512)),
        Column("fewer", "u1", np.zeros(511)),
    ]
    blob = pack(KIND, sent, {}, "zstd").joined()
    found = whole_head(blob, KIND).fields
    codecs = {"noise": "none", "zeros": "zstd", "few": "none", "enough": "zstd", "fewer": "none"}
    assert {name: field.codec for name, field in found.items()} == codecs
    assert len(blob) < 11_500


def forged(raw: bytes, declared: int) -> bytes:
    """A frame that declares another length than it has: two bytes behind the magic number and the descriptor."""
    frame = zstandard.compress(raw)
    assert struct.unpack_from("<H", frame, 5) == (len(raw) - 256,)
    return frame[:5] + struct.pack("<H", declared - 256) + frame[7:]


def compressed(frame: bytes, raw_bytes: int) -> bytes:
    row = ["a", "u1", [raw_bytes], len(frame), "zstd", len(frame), xxh3_64_digest(frame)]
    return sealed({"fields": [row], "plain": {}}, frame)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstandard.compress(bytes(50_000_000)), "declares 50000000 bytes, not 1000"),
        (zstandard.compress(bytes(999)), "declares 999 bytes, not 1000"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), "declares -1 bytes"),
        (zstandard.compress(bytes(1000)) + b"more", "not one whole zstd frame"),
        (zstandard.compress(bytes(1000))[:-1], "not one whole zstd frame"),
        (b"no zstd at all", "not one whole zstd frame"),
        (forged(bytes(999), 1000), "not one whole zstd frame"),
        (forged(bytes(1001), 1000), "not one whole zstd frame"),
    ],
)
def test_a_frame_never_unpacks_to_more_than_its_field(frame: bytes, message: str) -> None:
    good = compressed(zstandard.compress(bytes(1000)), 1000)
    assert whole(good)[0]["a"].nbytes == 1000
    with pytest.raises(BadPayload, match=message):
        whole(compressed(frame, 1000))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [Column("a", "u1", np.zeros(5_000)), Column("b", "u1", np.ones(5))]
    blob = pack(KIND, sent, {}, "zstd").joined()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(QueueError, match=r"penstock\[zstd\]"):
        pack(KIND, sent, {}, "zstd")
    with pytest.raises(QueueError, match=r"penstock\[zstd\]"):
        whole(blob)
    field = parse_head(blob, KIND).fields["b"]
    assert field.decode(blob[slice(*field.byte_range)]).tolist() == [1] * 5


def test_an_unknown_compression_is_refused_by_name() -> None:
    with pytest.raises(QueueError, match="compression: 'lz4' is unknown; one of none, zstd"):
        pack(KIND, [], {}, "lz4")
