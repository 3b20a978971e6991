"""The batch log: payloads of trained, uncommitted steps, stored on disk until their commit instead of in Redis.

    append(step, blobs) ──► STEP-NUMBER-WRITER.batch.tmp ─► fsync ─► rename ─► fsync of the folder ─► durable
    read(step, ids)     ──► tables of contents, each read once ─► one seek per payload, verified
    drop_below(step)    ──► deletes files of committed steps

A file is written once and never changed; an incomplete file never has a name that is read. NUMBER is greater than that
of every existing file: of an episode that was appended twice, the copy in the file with the highest number counts.
Several processes may share a folder if each uses its own writer names.

A file holds the payloads of one step after a table of contents. Little-endian:

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

The table determines the length of the file, so a truncated file is detected without reading any payload.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from penstock.common import fsync_path, write_synced
from penstock.transfer_queue.errors import BadPayload

_NAME = re.compile(r"(\d{8,})-(\d{8,})-[\w.-]+\.batch(\.tmp)?", re.ASCII)
_WRITER = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _BatchFile:
    path: Path
    step: int
    number: int
    whole: bool


class BatchLog:
    """Blocking; safe for several threads. `folder` is created by the first append, readable by its owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables: dict[Path, dict[str, PayloadLocation]] = {}
        """Tables of contents that were read."""
        self._appending = threading.Lock()
        self._reading = threading.Lock()

    def append(self, step: int, blobs: Mapping[str, bytes], writer: str) -> None:
        """Store packed payloads of `step` by episode id. They are durable when this returns.

        A failed call may be repeated. Raises `OSError` if the disk is full or missing, `ValueError` for a `writer` that
        cannot be part of a file name.
        """
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"writer is {writer!r}; letters, digits, '_', '.' and '-' only, at most 64")
        if not blobs:
            return
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fsync_path(self.folder.parent)
        with self._appending:
            number = 1 + max((file.number for file in self._files()), default=0)
            final = self.folder / f"{step:08d}-{number:08d}-{writer}.batch"
            temporary = final.with_name(f"{final.name}.tmp")
            try:
                write_synced(temporary, (pack_head(step, blobs), *blobs.values()))
                temporary.rename(final)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fsync_path(self.folder)

    def read(self, step: int | None, episode_ids: Iterable[str]) -> dict[str, bytes]:
        """Packed payloads of `step` (None: of any step) by episode id, in the order given.

        Raises `BadPayload` naming the file, the episode and the damaged or missing part.
        """
        names = list(dict.fromkeys(episode_ids))
        places = self._find(step, names)
        try:
            return {name: read_payload(name, places[name]) for name in names}
        except FileNotFoundError as error:
            raise BadPayload(f"{error.filename} was deleted while it was read: its step is committed") from error

    def drop_below(self, step: int) -> int:
        """Delete files of steps below `step`, including those of killed writers; returns the number of files."""
        gone = [file.path for file in self._files() if file.step < step]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def steps(self) -> list[int]:
        """Steps with at least one file, in order."""
        return sorted({file.step for file in self._files() if file.whole})

    def _files(self) -> Iterator[_BatchFile]:
        """Every file of the log; none if the folder does not exist yet."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                step, number, unfinished = match.groups()
                yield _BatchFile(path, int(step), int(number), unfinished is None)

    def _find(self, step: int | None, names: Sequence[str]) -> dict[str, PayloadLocation]:
        """The newest position of each episode. Tables are read newest first until all episodes are found."""
        missing, places, damaged = set(names), dict[str, PayloadLocation](), list[str]()
        for file in self._newest_first(step):
            if not missing:
                break
            try:
                table = self._table(file)
            except BadPayload as error:
                damaged.append(str(error))
                continue
            places |= {name: table[name] for name in missing & table.keys()}
            missing -= table.keys()
        if missing:
            where = f"the batch log {self.folder}" + ("" if step is None else f", step {step}")
            also = f"; files that cannot be read: {', '.join(damaged)}" if damaged else ""
            raise BadPayload(f"{min(missing)}: not in {where}{also}")
        return places

    def _newest_first(self, step: int | None) -> list[_BatchFile]:
        files = [file for file in self._files() if file.whole]
        here = {file.path for file in files}
        with self._reading:
            # Only one process deletes files; without this the tables of the others would grow without bound.
            self._tables = {path: table for path, table in self._tables.items() if path in here}
        chosen = [file for file in files if step in (None, file.step)]
        return sorted(chosen, key=lambda file: file.number, reverse=True)

    def _table(self, file: _BatchFile) -> dict[str, PayloadLocation]:
        """Empty if another process deleted the file meanwhile."""
        with self._reading:
            if file.path not in self._tables:
                try:
                    self._tables[file.path] = read_table(file.path, file.step)
                except FileNotFoundError:
                    return {}
            return self._tables[file.path]


MAGIC = b"PNBL"
FORMAT = 1
_PREAMBLE = struct.Struct("<4sHHQIIQ")
_CHECKSUM = struct.Struct("<Q")
HEAD_BYTES = _PREAMBLE.size + _CHECKSUM.size
_ROW = struct.Struct("<HQQ")


@dataclass(frozen=True, slots=True)
class PayloadLocation:
    """Position of one payload."""

    path: Path
    offset: int
    length: int
    checksum: int


def pack_head(step: int, blobs: Mapping[str, bytes]) -> bytes:
    """The head and table of contents of a file."""
    names = [episode_id.encode() for episode_id in blobs]
    rows = zip(names, blobs.values(), strict=True)
    table = b"".join(_ROW.pack(len(name), len(blob), xxh3_64_intdigest(blob)) + name for name, blob in rows)
    preamble = _PREAMBLE.pack(MAGIC, FORMAT, 0, step, len(blobs), len(table), xxh3_64_intdigest(table))
    return preamble + _CHECKSUM.pack(xxh3_64_intdigest(preamble)) + table


def read_table(path: Path, step: int) -> dict[str, PayloadLocation]:
    """Episode id → position of its payload. Raises `BadPayload` naming the damaged part, `FileNotFoundError`."""
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


def read_payload(episode_id: str, place: PayloadLocation) -> bytes:
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


def _read_head(head: bytes, step: int, name: str) -> tuple[int, int, int]:
    """(records, length of the table, its checksum)"""
    if len(head) < HEAD_BYTES:
        raise BadPayload(f"{name}: head: {len(head)} bytes of {HEAD_BYTES}; the file is cut short")
    magic, version, _, found_step, count, table_len, table_checksum = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise BadPayload(f"{name}: magic: {magic!r}, not {MAGIC!r}; this is not a file of a batch log")
    if version != FORMAT:
        raise BadPayload(f"{name}: format: version {version} is unknown; this build reads version {FORMAT}")
    if _CHECKSUM.unpack_from(head, _PREAMBLE.size) != (xxh3_64_intdigest(head[: _PREAMBLE.size]),):
        raise BadPayload(f"{name}: head: wrong checksum; the file was damaged")
    if found_step != step:
        raise BadPayload(f"{name}: step: {found_step} inside, {step} by its name; the file was renamed")
    return count, table_len, table_checksum


def _places(path: Path, table: bytes, count: int) -> Iterator[tuple[str, PayloadLocation]]:
    """Requires a verified table: its rows have the lengths that `pack_head` wrote."""
    at, payload_at = 0, HEAD_BYTES + len(table)
    for _ in range(count):
        name_len, length, checksum = _ROW.unpack_from(table, at)
        at += _ROW.size + name_len
        yield table[at - name_len : at].decode(), PayloadLocation(path, payload_at, length, checksum)
        payload_at += length
