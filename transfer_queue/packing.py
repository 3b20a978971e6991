"""A container for named arrays and plain data: no pickle, little-endian, checked field by field.

    offset  bytes
    0       4   magic ``PNST``
    4       2   format version (1)
    6       2   kind: what is inside
    8       4   length H of the head
    12      4   reserved, 0
    16      8   length B of the body
    24      8   xxh3-64 of the head
    32      H   head, msgpack: {"fields": [[name, dtype, shape, offset, xxh3-64 of the field], …], "plain": {…}}
    …       B   body: the arrays, each at a multiple of 8

The head's checksum covers the fields' checksums, so one field can be read and verified without the others.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from penstock.transfer_queue.ledger import BadPayload

MAGIC = b"PNST"
FORMAT = 1
PREAMBLE = struct.Struct("<4sHHIIQQ")
DTYPES: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}

Arrays = dict[str, NDArray[Any]]


def pack(kind: int, arrays: Mapping[str, tuple[str, NDArray[Any]]], plain: Mapping[str, Any]) -> bytes:
    """Pack `arrays` (name → (dtype name, values)) and `plain`. Raises `BadPayload` for other data."""
    table, chunks, offset = [], [], 0
    for name, (dtype, values) in arrays.items():
        raw = np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes()
        table.append([name, dtype, list(np.shape(values)), offset, xxh3_64_intdigest(raw)])
        chunks += [raw, bytes(-len(raw) % 8)]
        offset += len(raw) + -len(raw) % 8
    head = pack_plain({"fields": table, "plain": plain}, "plain data")
    preamble = PREAMBLE.pack(MAGIC, FORMAT, kind, len(head), 0, offset, xxh3_64_intdigest(head))
    return b"".join([preamble, head, bytes(-len(head) % 8), *chunks])


def unpack(blob: bytes, kind: int) -> tuple[Arrays, dict[str, Any]]:
    """Arrays (read-only views of `blob`) and plain data. Raises `BadPayload` naming what is damaged."""
    head, body_at = _read_head(blob, kind)
    arrays = {str(row[0]): _read_field(blob, body_at, row) for row in head["fields"]}
    return arrays, head["plain"]


def pack_plain(value: Any, field: str) -> bytes:
    """msgpack of plain data; numpy scalars and arrays become numbers and lists. Raises `BadPayload` naming `field`."""
    try:
        packed = msgpack.packb(value, default=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadPayload(f"{field}: {error}") from error
    return bytes(packed)


def unpack_plain(blob: bytes, field: str) -> Any:
    """The reverse of `pack_plain`. Raises `BadPayload` naming `field`."""
    try:
        return msgpack.unpackb(blob, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadPayload(f"{field}: not msgpack: {error}") from error


def _read_head(blob: bytes, kind: int) -> tuple[dict[str, Any], int]:
    if len(blob) < PREAMBLE.size:
        raise BadPayload(f"preamble: {len(blob)} bytes, {PREAMBLE.size} needed; the payload is truncated")
    magic, version, found, head_len, _, body_len, checksum = PREAMBLE.unpack_from(blob)
    if magic != MAGIC:
        raise BadPayload(f"magic: {magic!r}, not {MAGIC!r}; this is no payload of ours")
    if version != FORMAT:
        raise BadPayload(f"format: version {version} is unknown; this build reads version {FORMAT}")
    if found != kind:
        raise BadPayload(f"kind: {found}, expected {kind}")
    body_at = PREAMBLE.size + head_len + -head_len % 8
    if len(blob) != body_at + body_len:
        raise BadPayload(f"length: {len(blob)} bytes, {body_at + body_len} by its header; truncated or overwritten")
    head = blob[PREAMBLE.size : PREAMBLE.size + head_len]
    if xxh3_64_intdigest(head) != checksum:
        raise BadPayload("head: wrong checksum; the payload was damaged")
    return unpack_plain(head, "head"), body_at


def _read_field(blob: bytes, body_at: int, row: list[Any]) -> NDArray[Any]:
    name, dtype, shape, offset, checksum = row
    if dtype not in DTYPES:
        raise BadPayload(f"{name}: dtype {dtype!r} is unknown")
    count = math.prod(shape)
    start, end = body_at + offset, body_at + offset + count * DTYPES[dtype].itemsize
    if min([offset, *shape], default=0) < 0 or end > len(blob):
        raise BadPayload(f"{name}: bytes {start} to {end} lie outside of the payload")
    raw = memoryview(blob)[start:end]
    if xxh3_64_intdigest(raw) != checksum:
        raise BadPayload(f"{name}: wrong checksum; the payload was damaged")
    return np.frombuffer(raw, dtype=DTYPES[dtype]).reshape(shape)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.80} is not plain data")


HEAD_GUESS = 4096


def blob_length(p):
    return (
        PREAMBLE.size + 0
        if len(p) < PREAMBLE.size
        else (lambda u: PREAMBLE.size + u[3] + (-u[3] % 8) + u[5])(PREAMBLE.unpack_from(p))
    )


class Head:
    pass


def head_length(p):
    return 0


def parse_head(p, k):
    raise NotImplementedError
