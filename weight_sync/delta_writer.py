"""Writes a delta from the copies of the trainer's ranks, piece by piece: rank 0 never has more of it than a bucket's.

    plan_delta   what each tensor's change costs, from sums of the ranks: encodings, all lengths, whether it pays
    write_delta  bucket k and its marks ── checksums of the whole tensors ── index and values, each to its place
                 the file read back: checksum of each change ── header ── checksum of the file

Every length is known before the first bucket, so the file's bytes are the same however many ranks hold the version,
and whatever the buckets. The header, which has the checksums, is written last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.weight_sync.broadcast.offer import ITEM_BYTES, StreamDigests
from penstock.weight_sync.broadcast.share_changes import marked_places
from penstock.weight_sync.broadcast.source import WeightSource
from penstock.weight_sync.broadcast.stream_places import MarkedBucket, MarkedPart
from penstock.weight_sync.files.delta import IndexCoder, PlannedChange, delta_metadata
from penstock.weight_sync.files.file_format import (
    PIECE_BYTES,
    Section,
    WrittenFile,
    file_header,
    new_file,
    raw_bytes,
)
from penstock.weight_sync.manifest import TensorEntry


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """A delta that is smaller than the version."""

    base: int
    """The version that it changes."""
    changes: Sequence[PlannedChange | None]
    """Changes of each tensor of the stream; None if nothing changed."""

    @property
    def changed(self) -> list[PlannedChange]:
        return [change for change in self.changes if change is not None]

    @property
    def index_bytes(self) -> int:
        return sum(change.index_bytes for change in self.changed)

    @property
    def nbytes(self) -> int:
        """Without the header."""
        return sum(change.nbytes for change in self.changed)

    def header(self, base_state: str, checksums: Sequence[str]) -> bytes:
        """`base_state`: of the version that it changes. `checksums`: of each change, as 16 hex digits."""
        sections = [
            Section("index", "U8", (self.index_bytes,), self.index_bytes, ()),
            Section("values", "U8", (values := self.nbytes - self.index_bytes,), values, ()),
        ]
        return file_header(sections, delta_metadata(self.changed, base_state, checksums))


def plan_delta(source: WeightSource, version: int) -> DeltaPlan | None:
    """Plan a delta of the `version` that the ranks hold. None if some rank has nothing to compare it with, or it saves
    nothing.

    Raises `Superseded`, and `RuntimeError` where a rank is gone.
    """
    changes = source.changes(version)
    if changes is None:
        return None
    planned = []
    for tensor, gaps in zip(source.tensors, changes.gaps, strict=True):
        item_bytes = ITEM_BYTES[tensor.dtype]
        planned.append(PlannedChange.of(tensor.name, gaps, tensor.nbytes // item_bytes, item_bytes))
    plan = DeltaPlan(changes.base, planned)
    return plan if plan.nbytes < source.nbytes else None


def write_delta(
    path: Path,
    source: WeightSource,
    version: int,
    plan: DeltaPlan,
    base_state: str,
    *,
    bucket_bytes: int,
    durable: bool,
) -> tuple[WrittenFile, tuple[TensorEntry, ...]]:
    """The file, and the whole tensors of `version`. Blocks.

    Raises `NoSpace`, `Superseded`, `RuntimeError` where a rank is gone; no such file exists then.
    """
    unknown = ["0" * 16] * len(plan.changed)
    begin = len(plan.header(base_state, unknown))
    size = begin + plan.nbytes
    digests = StreamDigests(source.tensors)
    with new_file(path, size, durable=durable) as file:
        data = _Data(file.fileno(), begin, plan, source)
        for bucket in source.marked_buckets(version, bucket_bytes):
            digests.update(raw_bytes(bucket.bytes))
            data.add(bucket)
        header = plan.header(base_state, data.checksums())
        _write_at(file.fileno(), header, 0)
        whole = _checksum(file.fileno(), (0, size))
    return WrittenFile(path, size, whole), digests.entries()


class _Data:
    """The data behind the header: indices and values, each in the order of the tensors."""

    def __init__(self, descriptor: int, begin: int, plan: DeltaPlan, source: WeightSource) -> None:
        self._descriptor, self._begin, self._plan = descriptor, begin, plan
        self._index_at, self._values_at = begin, begin + plan.index_bytes
        self._counts = [tensor.nbytes // ITEM_BYTES[tensor.dtype] for tensor in source.tensors]
        self._tensor = -1
        self._coder = IndexCoder("whole", 0)
        """Coder of the tensor of that number."""

    def add(self, bucket: MarkedBucket) -> None:
        for part in bucket.parts:
            change = self._plan.changes[part.tensor]
            if change is not None:
                self._add(part, change)

    def _add(self, part: MarkedPart, change: PlannedChange) -> None:
        if change.encoding == "whole":
            self._write_values(part.words)
            return
        if part.tensor != self._tensor:
            self._tensor, self._coder = part.tensor, IndexCoder(change.encoding, self._counts[part.tensor])
        for _, end, places in marked_places(part.marks, part.first_mark, len(part.words)):
            index = self._coder.add(part.value + places, part.value + end)
            self._index_at = _write_at(self._descriptor, _raw(index), self._index_at)
            self._write_values(part.words[places])

    def checksums(self) -> list[str]:
        """Return the checksums of each change, index before values, as in the file. Raises `RuntimeError` if it
        lacks some.
        """
        index_at, values_at = self._begin, self._begin + self._plan.index_bytes
        checksums = []
        for change in self._plan.changed:
            index, values = (index_at, change.index_bytes), (values_at, change.value_bytes)
            checksums.append(_checksum(self._descriptor, index, values))
            index_at, values_at = sum(index), sum(values)
        if (index_at, values_at) != (self._index_at, self._values_at):
            raise RuntimeError("the ranks' changes are not those that they counted: the delta is not written")
        return checksums

    def _write_values(self, values: NDArray[np.generic]) -> None:
        self._values_at = _write_at(self._descriptor, _raw(values), self._values_at)


def _raw(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _write_at(descriptor: int, data: bytes | memoryview, at: int) -> int:
    """Write data at a place. Returns its end."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining, at)
        remaining, at = remaining[written:], at + written
    return at


def _checksum(descriptor: int, *ranges: tuple[int, int]) -> str:
    """xxh3 of the bytes of the file from each place on, one range after the other."""
    digest = xxhash.xxh3_64()
    for at, nbytes in ranges:
        for begin in range(at, at + nbytes, PIECE_BYTES):
            digest.update(os.pread(descriptor, min(PIECE_BYTES, at + nbytes - begin), begin))
    return digest.hexdigest()
