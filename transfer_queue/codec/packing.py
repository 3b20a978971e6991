"""A container for named arrays and plain data: no pickle, little-endian, checked block by block.

    offset  bytes
    0       4   magic ``PNST``
    4       2   format version (2)
    6       2   kind: what is inside
    8       4   length H of the head
    12      4   reserved, 0
    16      8   length B of the body
    24      8   xxh3-64 of the head
    32      H   head, msgpack: {"fields": [a row of `fields` …], "plain": {…}}
    …           zeros up to a multiple of 8
    …       B   body: the fields in the order of their rows, nothing between them

The head's checksum covers the fields' checksums, so a field can be read and verified without the rest:

    prefix = read(0, HEAD_GUESS); prefix = read(0, head_length(prefix)) if that is more
    field = parse_head(prefix, kind).fields["0.response_mask"]
    mask = field.decode(read(*field.byte_range))
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from penstock.transfer_queue.codec.columns import (
    MAX_RAW_BYTES,
    Column,
    Field,
    check_compression,
    field_from_row,
    store,
)
from penstock.transfer_queue.errors import BadPayload

MAGIC = b"PNST"
FORMAT = 2
PREAMBLE = struct.Struct("<4sHHIIQQ")
HEAD_GUESS = 4096
"""Bytes to read first: the preamble and the head of nearly every payload."""
NAMED_DEPTH = 8
UNPACKABLE = (TypeError, ValueError, OverflowError)
"""Exceptions that msgpack raises for a value that it cannot pack."""
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PayloadHead:
    """Contents of a payload and their positions."""

    plain: Mapping[str, Any]
    fields: Mapping[str, Field]
    size: int
    """Bytes of the whole payload."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A payload as a list of buffers that reference the arrays, so that sending copies nothing."""

    buffers: Sequence[Any]
    size: int
    """Bytes of all of them."""

    def joined(self) -> bytes:
        return b"".join(self.buffers)


def pack(kind: int, columns: Iterable[Column], plain: Mapping[str, Any], compression: str = "none") -> Packed:
    """Pack arrays and plain data. Raises `BadPayload` for other data, `QueueError` for an unknown compression.

    The arrays must not change while the buffers are in use.
    """
    check_compression(compression)
    stored = [store(column, compression) for column in columns]
    stored.sort(key=attrgetter("aligned"), reverse=True)
    body_len = raw_bytes = 0
    for one in stored:
        body_len += one.row[3]
        raw_bytes += one.raw_bytes
    _check_raw_bytes(raw_bytes)
    head = pack_plain({"fields": [one.row for one in stored], "plain": plain}, "plain data")
    preamble = PREAMBLE.pack(MAGIC, FORMAT, kind, len(head), 0, body_len, xxh3_64_intdigest(head))
    start = b"".join([preamble, head, bytes(-len(head) % 8)])
    return Packed([start, *(one.raw for one in stored)], len(start) + body_len)


def whole_head(blob: bytes, kind: int) -> PayloadHead:
    """`parse_head` of a whole payload. Also raises `BadPayload` if bytes of the body are missing."""
    head = parse_head(blob, kind)
    if len(blob) != head.size:
        raise BadPayload(f"length: {len(blob)} bytes, {head.size} by its header; truncated or overwritten")
    return head


def read_arrays(head: PayloadHead, blob: bytes) -> Arrays:
    """All fields of a whole payload: read-only, views of `blob` unless compressed. Raises `BadPayload`."""
    view = memoryview(blob)
    return {name: field.decode(view[slice(*field.byte_range)]) for name, field in head.fields.items()}


def head_length(prefix: bytes) -> int:
    """Returns the bytes that `parse_head` needs. Raises `BadPayload` for a short or foreign preamble."""
    return _body_at(_read_preamble(prefix)[1])


def parse_head(prefix: bytes, kind: int) -> PayloadHead:
    """The head of a payload that starts with `prefix`, verified. Raises `BadPayload` naming the damaged part."""
    actual, head_len, reserved, body_len, checksum = _read_preamble(prefix)
    if actual != kind:
        raise BadPayload(f"kind: {actual}, expected {kind}")
    body_at = _body_at(head_len)
    if len(prefix) < body_at:
        raise BadPayload(f"head: {len(prefix)} bytes, {body_at} needed; the payload is truncated")
    head = memoryview(prefix)[PREAMBLE.size : PREAMBLE.size + head_len]
    if xxh3_64_intdigest(head) != checksum:
        raise BadPayload("head: wrong checksum; the payload was damaged")
    if reserved or any(prefix[PREAMBLE.size + head_len : body_at]):
        raise BadPayload("head: reserved bytes are not 0; the payload was damaged")
    return _head_from_plain(unpack_plain(head, "head"), body_at, body_len)


def pack_plain(value: Any, field: str) -> bytes:
    """msgpack of plain data; numpy scalars and arrays become numbers and lists, any mapping a map.

    Raises `BadPayload` naming `field` and the keys below it.
    """
    try:
        packed = msgpack.packb(value, default=_plain)
    except UNPACKABLE as error:
        raise BadPayload(f"{_culprit(value, field)}: {_reason(error)}") from error
    return bytes(packed)


def _culprit(value: Any, field: str, depth: int = 0) -> str:
    """Field and keys of the innermost part that cannot be packed, or of one `NAMED_DEPTH` levels down."""
    is_map = isinstance(value, Mapping)
    parts = value.items() if is_map else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts if depth < NAMED_DEPTH else ():
        try:
            msgpack.packb(part, default=_plain)
        except UNPACKABLE:
            return _culprit(part, f"{field}.{key}" if is_map else f"{field}[{key}]", depth + 1)
    return field


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"half of a surrogate pair at character {error.start}, which is not Unicode text"
    if isinstance(error, OverflowError):
        return "an integer over 64 bits: write it as text"
    return "nested too deeply" if "recursion" in str(error) else str(error)


def unpack_plain(blob: bytes | memoryview, field: str) -> Any:
    """The reverse of `pack_plain`. Raises `BadPayload` naming `field`."""
    try:
        return msgpack.unpackb(blob, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadPayload(f"{field}: not msgpack: {error}") from error


def _read_preamble(prefix: bytes) -> tuple[int, int, int, int, int]:
    """(kind, length of the head, reserved, length of the body, the head's checksum)"""
    if len(prefix) < PREAMBLE.size:
        raise BadPayload(f"preamble: {len(prefix)} bytes, {PREAMBLE.size} needed; the payload is truncated")
    magic, version, kind, head_len, reserved, body_len, checksum = PREAMBLE.unpack_from(prefix)
    if magic != MAGIC:
        raise BadPayload(f"magic: {magic!r}, not {MAGIC!r}; this is not a payload of ours")
    if version != FORMAT:
        raise BadPayload(f"format: version {version} is unknown; this build reads version {FORMAT}")
    return kind, head_len, reserved, body_len, checksum


def _head_from_plain(head: Any, body_at: int, body_len: int) -> PayloadHead:
    if not isinstance(head, dict) or head.keys() != {"fields", "plain"} or not isinstance(head["plain"], dict):
        raise BadPayload("head: not a map of fields and plain data")
    rows, at, raw_bytes = head["fields"], body_at, 0
    fields: dict[str, Field] = {}
    for row in rows if isinstance(rows, list) else [rows]:
        field = field_from_row(row, at)
        fields[field.name] = field
        at += field.size
        raw_bytes += field.raw_bytes
    if len(fields) != len(rows):
        raise BadPayload("head: two fields have one name")
    if at != body_at + body_len:
        raise BadPayload(f"length: a body of {body_len} bytes, its fields have {at - body_at}; damaged")
    _check_raw_bytes(raw_bytes)
    return PayloadHead(head["plain"], fields, at)


def _body_at(head_len: int) -> int:
    return PREAMBLE.size + head_len + -head_len % 8


def _check_raw_bytes(total: int) -> None:
    if total > MAX_RAW_BYTES:
        raise BadPayload(f"fields: {total} bytes unpacked, over the limit of {MAX_RAW_BYTES}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, int):
        raise OverflowError
    raise TypeError(f"{type(value).__name__} {value!r:.80} is not plain data")
