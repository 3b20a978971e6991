"""Places of a stream's bytes and of the marks of changes: the rank, the place in its copies, the tensor."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.weight_sync.broadcast.share_changes import mark_bytes
from penstock.weight_sync.files.delta import WORD_TYPES, Words

APART_BYTES = 1 << 18
"""A part of so much is sent to its place; to copy it there from a message of several would cost more than a message."""


@dataclass(frozen=True, slots=True)
class MarkedPart:
    """Consecutive values of one tensor in a bucket, and which of them changed."""

    tensor: int
    """Number of the tensor in the stream's order."""
    value: int
    """Place of the first of the values in the tensor."""
    words: Words
    """[values] their bits, as integers of their size."""
    marks: NDArray[np.uint8]
    first_mark: int
    """Bit in `marks` of the first value."""


@dataclass(frozen=True, slots=True)
class MarkedBucket:
    bytes: torch.Tensor
    """[bytes] uint8 of the stream."""
    parts: Sequence[MarkedPart]
    """All of them, in the stream's order."""


@dataclass(slots=True)
class Bucket:
    """One to be filled."""

    version: int
    begin: int
    """Offset in the stream."""
    bytes: torch.Tensor
    """[bytes] uint8, as long as the bucket."""
    scratch: torch.Tensor
    """Buffer of the same length: data from a rank that is not a range of the bucket lies here first. Unused with one
    rank."""
    marked: bool = False
    """True if `parts` and `marks` are wanted."""
    parts: list[Part] = field(default_factory=list)
    marks: dict[int, tuple[int, NDArray[np.uint8]]] = field(default_factory=dict)
    """Number of each rank's first mark, and its marks."""

    def ranges(self, parts: Sequence[Part]) -> list[RankRange]:
        """Return the range of each rank in this bucket, in the order of the ranks. `parts`: all of the bucket."""
        ranges, used = [], 0
        for rank in sorted({part.rank for part in parts}):
            for own in messages([part for part in parts if part.rank == rank]):
                nbytes, at = own[-1].local_end - own[0].local, own[0].stream - self.begin
                scattered = own[-1].stream + own[-1].nbytes - own[0].stream > nbytes
                if scattered:
                    memory = self.scratch[used : used + nbytes]
                    used += nbytes
                else:
                    memory = self.bytes[at : at + nbytes]
                ranges.append(RankRange(rank, own, memory, scattered))
        return ranges

    def place(self, came: RankRange) -> None:
        """Place a range whose `memory` is filled."""
        if came.scattered:
            scatter(came.memory, came.parts, self)

    def marked_part(self, part: Part) -> MarkedPart:
        first, marks = self.marks[part.rank]
        at = part.stream - self.begin
        words = self.bytes[at : at + part.nbytes].view(WORD_TYPES[part.item_bytes]).numpy()
        return MarkedPart(part.tensor, part.value, words, marks, part.mark - first)


class Part(NamedTuple):
    """Consecutive bytes of the stream that are on one rank."""

    rank: int
    stream: int
    """Their offset in the stream."""
    local: int
    """Their offset in the rank's copies."""
    nbytes: int
    item_bytes: int
    """Bytes of a value."""
    tensor: int
    """Number of the tensor in the stream's order."""
    value: int
    """Place of the first value in the tensor."""
    mark: int
    """Number of its mark among those of the rank."""

    @property
    def local_end(self) -> int:
        return self.local + self.nbytes


class RankRange(NamedTuple):
    """Bytes of one bucket that a rank sends at once: one range of its copies."""

    rank: int
    parts: list[Part]
    memory: torch.Tensor
    """[bytes] uint8 at their target: the scratch if they are `scattered`, else their place in the bucket."""
    scattered: bool
    """They are no range of the bucket."""

    @property
    def begin(self) -> int:
        return self.parts[0].local

    @property
    def end(self) -> int:
        return self.parts[-1].local_end


class Places:
    """Which rank has which bytes of the stream."""

    def __init__(
        self, sizes: Iterable[tuple[int, ...]], items: Sequence[int], orders: Iterable[tuple[int, ...]] = repeat(())
    ) -> None:
        """`sizes`: of each tensor in the stream's order, the bytes on each rank. `items`: the bytes of its values.
        `orders`: the ranks in the order of their bytes, empty where it is ascending."""
        self.items = items
        self.parts: list[Part] = []
        self.total, local, marks = 0, dict[int, int](), dict[int, int]()
        for tensor, ((each, item), order) in enumerate(zip(zip(sizes, items, strict=True), orders, strict=False)):
            value = 0
            for rank in order or range(len(each)):
                if nbytes := each[rank]:
                    at, mark = local.get(rank, 0), marks.get(rank, 0)
                    self.parts.append(Part(rank, self.total, at, nbytes, item, tensor, value, 8 * mark))
                    self.total += nbytes
                    value += nbytes // item
                    local[rank] = at + nbytes
                    marks[rank] = mark + mark_bytes(nbytes // item)
        self._begins = [part.stream for part in self.parts]

    def within(self, begin: int, end: int) -> list[Part]:
        """The parts of the bytes from `begin` to `end`, cut to them."""
        parts = []
        for part in self.parts[max(0, bisect.bisect_right(self._begins, begin) - 1) :]:
            if part.stream >= end:
                break
            cut = max(begin - part.stream, 0)
            nbytes = min(end, part.stream + part.nbytes) - part.stream - cut
            values = cut // part.item_bytes
            parts.append(
                part._replace(
                    stream=part.stream + cut,
                    local=part.local + cut,
                    nbytes=nbytes,
                    value=part.value + values,
                    mark=part.mark + values,
                )
            )
        return parts


def messages(parts: Sequence[Part]) -> list[list[Part]]:
    """`parts`, one rank's of one bucket, as they are sent: what is one range of the stream at once, small ones too."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and _goes_with(groups[-1], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _goes_with(message: list[Part], part: Part) -> bool:
    """A rank's parts follow each other in its copies."""
    nbytes, end = part.local - message[0].local, message[-1].stream + message[-1].nbytes
    is_range = end - message[0].stream == nbytes and end == part.stream
    return is_range or nbytes + part.nbytes < APART_BYTES


def scatter(source: torch.Tensor, parts: Sequence[Part], bucket: Bucket) -> None:
    """`source` holds one rank's bytes from the first part's place on."""
    for part in parts:
        at = part.stream - bucket.begin
        bucket.bytes[at : at + part.nbytes] = source[part.local - parts[0].local :][: part.nbytes]
