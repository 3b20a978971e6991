"""One file of the batch log: payloads of one step, written once, with their table of contents in front. Little-endian.

    offset  bytes
    0       4   magic ``PNBL``
    4       2   format version (1)
    6       2   reserved, 0
    8       8   step
    16      4   number of records N
    20      4   length T of the table
    24      8   xxh3-64 of the table
    32      8   xxh3-64 of bytes 0 … 31
    40      T   table, N times: length of the id (2), length of the payload (8), xxh3-64 of the payload (8), id (UTF-8)
    …           the payloads, one after the other, in the order of the table

The table says how long the file must be, so a file that was cut short is known without reading any payload.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from penstock.transfer_queue.queue import BadPayload

MAGIC = b"PNBL"
FORMAT = 1
_PREAMBLE = struct.Struct("<4sHHQIIQ")
_CHECKSUM = struct.Struct("<Q")
HEAD_BYTES = _PREAMBLE.size + _CHECKSUM.size
_ROW = struct.Struct("<HQQ")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one payload lies."""

    path: Path
    offset: int
    length: int
    checksum: int


def pack_head(step: int, blobs: Mapping[str, bytes]) -> bytes:
    """Everything in front of the payloads."""
    table = b"".join(_pack_row(episode_id, blob) for episode_id, blob in blobs.items())
    preamble = _PREAMBLE.pack(MAGIC, FORMAT, 0, step, len(blobs), len(table), xxh3_64_intdigest(table))
    return preamble + _CHECKSUM.pack(xxh3_64_intdigest(preamble)) + table


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """A new file, readable by its owner only, that survives a power cut once its name does."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def read_table(path: Path, step: int) -> dict[str, Place]:
    """Episode id → where its payload is. Raises `BadPayload` naming what is damaged, `FileNotFoundError`."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        count, table_len, table_checksum = _read_head(head, step, path.name)
        table = file.read(table_len)
        size = os.fstat(file.fileno()).st_size
    if len(table) != table_len:
        raise BadPayload(f"{path.name}: table: {len(table)} bytes of {table_len}; the file is cut short")
    if xxh3_64_intdigest(table) != table_checksum:
        raise BadPayload(f"{path.name}: table: wrong checksum; the file was damaged")
    places = dict(_places(path, table, count))
    end = max((place.offset + place.length for place in places.values()), default=HEAD_BYTES + table_len)
    if size != end:
        raise BadPayload(f"{path.name}: length: {size} bytes, {end} by its table; cut short or overwritten")
    return places


def read_payload(episode_id: str, place: Place) -> bytes:
    """Raises `BadPayload` naming file and episode, `FileNotFoundError`."""
    with place.path.open("rb") as file:
        file.seek(place.offset)
        blob = file.read(place.length)
    where = f"{place.path.name}: {episode_id}"
    if len(blob) != place.length:
        raise BadPayload(f"{where}: payload: {len(blob)} bytes of {place.length}; the file is cut short")
    if xxh3_64_intdigest(blob) != place.checksum:
        raise BadPayload(f"{where}: payload: wrong checksum; the file was damaged")
    return blob


def _pack_row(episode_id: str, blob: bytes) -> bytes:
    name = episode_id.encode()
    return _ROW.pack(len(name), len(blob), xxh3_64_intdigest(blob)) + name


def _read_head(head: bytes, step: int, name: str) -> tuple[int, int, int]:
    """(records, length of the table, its checksum)"""
    if len(head) < HEAD_BYTES:
        raise BadPayload(f"{name}: head: {len(head)} bytes of {HEAD_BYTES}; the file is cut short")
    magic, version, _, found_step, count, table_len, table_checksum = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise BadPayload(f"{name}: magic: {magic!r}, not {MAGIC!r}; this is no file of a batch log")
    if version != FORMAT:
        raise BadPayload(f"{name}: format: version {version} is unknown; this build reads version {FORMAT}")
    if _CHECKSUM.unpack_from(head, _PREAMBLE.size) != (xxh3_64_intdigest(head[: _PREAMBLE.size]),):
        raise BadPayload(f"{name}: head: wrong checksum; the file was damaged")
    if found_step != step:
        raise BadPayload(f"{name}: step: {found_step} inside, {step} by its name; the file was renamed")
    return count, table_len, table_checksum


def _places(path: Path, table: bytes, count: int) -> Iterator[tuple[str, Place]]:
    """Only for a table whose checksum is right: its rows then have the lengths that `pack_head` gave them."""
    at, payload_at = 0, HEAD_BYTES + len(table)
    for _ in range(count):
        name_len, length, checksum = _ROW.unpack_from(table, at)
        at += _ROW.size + name_len
        yield table[at - name_len : at].decode(), Place(path, payload_at, length, checksum)
        payload_at += length
