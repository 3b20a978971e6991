"""One array of a payload: how it is stored, and its row in the head's table.

A row is [name, dtype, shape, stored bytes, codec, block, checksums]: one xxh3-64 for every `block` stored bytes (the
last block may be shorter). A compressed field (zstd, by the package `zstandard`) is one block. Rows have no offset:
fields follow each other in table order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

from penstock.transfer_queue.errors import BadPayload, QueueError

BLOCK = 64 << 10
MAX_RAW_BYTES = 1 << 30
"""Limit of all fields of a payload, unpacked: no head makes a reader allocate more."""
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in ("i4", "f4", "u1", "u2")}
MOST_DIMENSIONS = 3


class Column(NamedTuple):
    """An array to be stored."""

    name: str
    dtype: str
    """A key of `DTYPES`."""
    values: Any
    """[rows], [rows, n] or [rows, n, m]"""
    sliced: bool = False
    """A long one gets a checksum per `BLOCK` instead of one."""


class StoredColumn(NamedTuple):
    """An array as stored in the body."""

    row: list[Any]
    raw: Any
    """A buffer: its bytes, a view of the array, if it is stored as it is: no copy before the final join."""
    raw_bytes: int
    """Bytes of it unpacked."""
    aligned: bool
    """True if its length is a multiple of 4. These come first, so that every 4-byte array can be used in place."""


class Field(NamedTuple):
    """Position and encoding of an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Position of its first stored byte in the payload."""
    size: int
    """Stored bytes."""
    codec: str
    block: int
    checksums: bytes
    """[blocks · 8] xxh3-64 of each block, most significant byte first."""
    row_bytes: int
    """Bytes of one row unpacked."""

    @property
    def raw_bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    @property
    def byte_range(self) -> tuple[int, int]:
        """Range of payload bytes (first, last + 1) that `decode` needs."""
        return self.start, self.start + self.size

    def decode(self, raw: Any) -> NDArray[Any]:
        """The array from its bytes: read-only, without a copy unless compressed. Raises `BadPayload`."""
        if len(raw) != self.size:
            raise BadPayload(f"{self.name}: {len(raw)} bytes, {self.size} by the head; the payload is truncated")
        if _checksums(raw, self.block) != self.checksums:
            raise BadPayload(f"{self.name}: wrong checksum; the payload was damaged")
        whole = raw if self.codec == "none" else decompress(raw, self.raw_bytes, self.name)
        return np.ndarray(self.shape, DTYPES[self.dtype], whole)


def store(column: Column, compression: str = "none") -> StoredColumn:
    """Encode one column. Raises `BadPayload` for values that are not an array of its dtype."""
    name, dtype, values, sliced = column
    try:
        array = np.asarray(values, DTYPES[dtype], order="C")
    except (TypeError, ValueError, OverflowError) as error:
        raise BadPayload(f"{name}: {error}") from error
    if not 1 <= array.ndim <= MOST_DIMENSIONS:
        raise BadPayload(f"{name}: has {array.ndim} dimensions; 1 to {MOST_DIMENSIONS} can be stored")
    raw, codec = array.data.cast("B") if array.size else b"", "none"
    packed = compress(raw, array.nbytes) if compression == "zstd" else None
    if packed is not None:
        raw, codec = packed, "zstd"
    block = min(BLOCK, len(raw)) if sliced and codec == "none" else len(raw)
    row = [name, dtype, array.shape, len(raw), codec, block, _checksums(raw, block)]
    return StoredColumn(row, raw, array.nbytes, codec == "none" and array.itemsize == 4)


def field_from_row(row: Any, start: int) -> Field:
    """The field of a table row, stored at `start`. Raises `BadPayload` for a row that `store` cannot produce."""
    types = (str, str, list, int, str, int, bytes)
    if not isinstance(row, list) or len(row) != 7 or not all(map(isinstance, row, types)):
        raise BadPayload(f"head: malformed row {row!r:.80} in the table of fields")
    name, dtype, shape, size, codec, block, checksums = row
    if dtype not in DTYPES:
        raise BadPayload(f"{name}: dtype {dtype!r} is unknown")
    if codec not in COMPRESSIONS:
        raise BadPayload(f"{name}: codec {codec!r} is unknown")
    are_lengths = all(type(length) is int and 0 <= length <= MAX_RAW_BYTES for length in shape)
    if not (1 <= len(shape) <= MOST_DIMENSIONS and are_lengths):
        raise BadPayload(f"{name}: shape {shape!r:.80} is none of ours")
    row_bytes = math.prod(shape[1:]) * DTYPES[dtype].itemsize
    field = Field(name, dtype, tuple(shape), start, size, codec, block, checksums, row_bytes)
    _check_sizes(field, shape[0] * row_bytes)
    return field


def _check_sizes(field: Field, raw_bytes: int) -> None:
    size, block, is_plain = field.size, field.block, field.codec == "none"
    if size < 0 or (is_plain and size != raw_bytes):
        raise BadPayload(f"{field.name}: {size} stored bytes do not hold shape {field.shape}")
    if block != size and not (0 < block < size and is_plain):
        raise BadPayload(f"{field.name}: blocks of {block} bytes do not fit {size}")
    blocks = -(-size // max(block, 1))
    if len(field.checksums) != blocks * 8:
        raise BadPayload(f"{field.name}: {len(field.checksums)} bytes of checksums for {blocks} blocks")


def _checksums(raw: Any, block: int) -> bytes:
    """One per block; none for an empty field."""
    if 0 < len(raw) <= block:
        return xxh3_64_digest(raw)
    view = memoryview(raw)
    return b"".join([xxh3_64_digest(view[at : at + block]) for at in range(0, len(view), max(block, 1))])


COMPRESSIONS = ("none", "zstd")


def check_compression(name: str) -> None:
    """Raise `QueueError` for an unknown name or a missing package."""
    if name not in COMPRESSIONS:
        raise QueueError(f"compression: {name!r} is unknown; one of {', '.join(COMPRESSIONS)}")
    if name == "zstd":
        _zstandard()


def compress(raw: Any, size: int) -> bytes | None:
    """One zstd frame of the buffer `raw` of `size` bytes; None unless it is clearly smaller."""
    if size < 512:
        return None
    # Higher levels cost several times the time for a few percent of token ids; logprobs hardly shrink at any.
    packed: bytes = _zstandard().ZstdCompressor(level=1).compress(raw)
    return packed if len(packed) < 0.9 * size else None


def decompress(packed: Any, size: int, field: str) -> bytes:
    """The `size` bytes of one frame. Raises `BadPayload` naming `field`, `QueueError` without the package.

    The frame must declare exactly `size`: zstandard allocates what a frame declares, so a small payload could
    otherwise take all memory.
    """
    zstandard = _zstandard()
    try:
        declared = zstandard.frame_content_size(packed)
        if declared != size:
            raise BadPayload(f"{field}: its zstd frame declares {declared} bytes, not {size}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPayload(f"{field}: not one whole zstd frame: {error}") from error
    return raw


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise QueueError("zstd payloads need the package zstandard: pip install 'penstock[zstd]'") from error
    return zstandard
