"""Which values of a rank's share differ from the version before: found while the new version replaces it in memory.

A mark is one bit per value, so the marks of a share take a sixteenth of it in bfloat16, however much changed. Each
tensor's begin with a new byte. Values are compared as words of their size: -0.0 is not 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.weight_sync.broadcast.memory import on_host
from penstock.weight_sync.files.delta import Gaps, Positions, words_of

MOVED_VALUES = 1 << 24
"""Brought to the host at once."""
CHUNK_VALUES = 1 << 18
"""Compared at once: few enough for a processor's cache."""
PIECE_VALUES = 1 << 20
"""Places that are held at once."""
NOT_COMPARED = -1
SUMMARY_WIDTH = 6
"""Length of a `row_of`: count, first, last, and the repeats of three widths."""


class ShareChanges:
    """Changes of one rank and version."""

    def __init__(self, base: int | None, counts: Sequence[int]) -> None:
        """`base`: the version before, None if there is none to compare with. `counts`: this rank's values of each
        tensor."""
        self.base = base
        self._counts = counts
        self._begins = list(itertools.accumulate(map(mark_bytes, counts), initial=0))
        self.marks = torch.zeros(self._begins[-1] if base is not None else 0, dtype=torch.uint8)
        """[bytes] those of all tensors, low bits first."""

    def replace(self, number: int, copy: torch.Tensor, fresh: torch.Tensor) -> None:
        """`copy` [values] on the CPU becomes `fresh` [values], cast, and what differs is marked.

        `number`: of the tensor. `fresh` may be on any device, in any dtype.
        """
        begin = self._begins[number]
        pieces = fresh.split(MOVED_VALUES)
        moved = pieces if fresh.is_cpu else on_host(pieces, copy.dtype)
        for old, new in zip(copy.split(MOVED_VALUES), moved, strict=True):
            if self.base is None:
                old.copy_(new)
            else:
                _compare(self.marks.numpy()[begin : begin + mark_bytes(len(new))], old, new)
            begin += mark_bytes(len(new))

    def summary(self) -> torch.Tensor:
        """[1 + tensors, `SUMMARY_WIDTH`] int64: the base version, or `NOT_COMPARED`; then the `Gaps` of each tensor."""
        rows = np.zeros((1 + len(self._counts), SUMMARY_WIDTH), np.int64)
        rows[0, 0] = NOT_COMPARED if self.base is None else self.base
        if self.base is not None:
            for number, count in enumerate(self._counts):
                marks = self.marks[self._begins[number] : self._begins[number + 1]].numpy()
                gaps = Gaps()
                for _, _, positions in marked_places(marks, 0, count):
                    gaps = gaps.followed_by(Gaps.of(positions))
                rows[1 + number] = row_of(gaps)
        return torch.from_numpy(rows)


def _compare(marks: NDArray[np.uint8], copy: torch.Tensor, fresh: torch.Tensor) -> None:
    for begin in range(0, len(copy), CHUNK_VALUES):
        old = copy[begin : begin + CHUNK_VALUES]
        new = fresh[begin : begin + CHUNK_VALUES].to(copy.dtype)
        packed = np.packbits(words_of(old) != words_of(new), bitorder="little")
        marks[begin // 8 : begin // 8 + packed.size] = packed
        old.copy_(new)


def mark_bytes(count: int) -> int:
    """Return the bytes of one tensor's marks."""
    return -(-count // 8)


def row_of(gaps: Gaps) -> list[int]:
    return [gaps.count, gaps.first, gaps.last, *gaps.repeats]


def gaps_of(row: Sequence[int]) -> Gaps:
    """Back from `row_of`."""
    count, first, last, *repeats = row
    return Gaps(count, first, last, tuple(repeats))


def marked_places(marks: NDArray[np.uint8], first: int, count: int) -> Iterator[tuple[int, int, Positions]]:
    """The marks of `count` values, from bit `first` on, in pieces: begin, end, and the marked places, all of values."""
    for begin in range(0, count, PIECE_VALUES):
        end = min(begin + PIECE_VALUES, count)
        yield begin, end, begin + _places(marks, first + begin, end - begin)


def _places(marks: NDArray[np.uint8], first: int, count: int) -> Positions:
    """[C] where the bits are set, counted from bit `first`."""
    skipped = first % 8
    bits = np.unpackbits(marks[first // 8 :], count=skipped + count, bitorder="little")
    return np.flatnonzero(bits[skipped:].view(np.bool_))
