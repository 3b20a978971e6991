"""Which values of a tensor changed, bit by bit, in as few bytes as a simple code allows.

Values are compared as words of their size, so that -0.0 and NaNs are exact. Where they are, in ascending order:

    gaps8|16|32   per value the number of unchanged ones before it; the width's largest number L means "L, and go on"
    bitmap        one bit per value of the tensor
    whole         no index: all values come
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

Encoding = Literal["gaps8", "gaps16", "gaps32", "bitmap", "whole"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)
Words = NDArray[np.generic]
Positions = NDArray[np.int64]
_GAP_TYPES: dict[Encoding, str] = {"gaps8": "<u1", "gaps16": "<u2", "gaps32": "<u4"}
_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BadDelta(ValueError):
    """The bytes are no change of this tensor."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one tensor of N values."""

    encoding: Encoding
    index: NDArray[np.generic]
    """Where, as `encoding` says; empty under ``whole``."""
    values: Words
    """[C] new words of the C values that changed, ascending by place; [N] under ``whole``."""


def words_of(tensor: torch.Tensor) -> Words:
    """[N] the tensor's bits as integers of its item size; a view where the tensor is contiguous and on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(_WORD_TYPES[tensor.element_size()]).numpy()


def find_change(before: Words, after: Words) -> Change | None:
    """None where no bit differs; ``whole`` where the places would cost more than they save."""
    positions = np.flatnonzero(before != after)
    if not positions.size:
        return None
    encoding, index = encode_positions(positions, before.size)
    if index.nbytes + positions.size * after.itemsize >= after.nbytes:
        return Change("whole", np.empty(0, np.uint8), after)
    return Change(encoding, index, after[positions])


def apply_change(target: Words, encoding: Encoding, index: memoryview, values: memoryview) -> None:
    """Write the new words into `target`, in place. Raises `BadDelta` before anything is written."""
    if len(values) % target.itemsize:
        raise BadDelta(f"{len(values)} bytes are no whole number of values")
    words = np.frombuffer(values, target.dtype)
    if encoding != "whole":
        target[decode_positions(encoding, index, words.size, target.size)] = words
    elif words.size == target.size:
        target[:] = words
    else:
        raise BadDelta(f"{words.size} values, the tensor has {target.size}")


def encode_positions(positions: Positions, size: int) -> tuple[Encoding, NDArray[np.generic]]:
    """The shortest code of ascending `positions` below `size`."""
    gaps = np.diff(positions, prepend=-1) - 1
    costs: dict[Encoding, int] = {"bitmap": -(-size // 8)}
    for encoding, code in _GAP_TYPES.items():
        numbers = gaps.size + int((gaps // _largest(code)).sum())
        costs[encoding] = numbers * np.dtype(code).itemsize
    best = min(costs, key=lambda encoding: costs[encoding])
    return best, _bitmap(positions, size) if best == "bitmap" else _encode_gaps(gaps, _GAP_TYPES[best])


def decode_positions(encoding: Encoding, index: memoryview, count: int, size: int) -> Positions:
    """[count] ascending places below `size`. Raises `BadDelta` where the bytes say anything else."""
    found = _decode_bitmap(index, size) if encoding == "bitmap" else _decode_gaps(index, _GAP_TYPES[encoding])
    if found.size != count:
        raise BadDelta(f"{found.size} places for {count} values")
    if count and found[-1] >= size:
        raise BadDelta(f"place {found[-1]} in a tensor of {size} values")
    return found


def _encode_gaps(gaps: Positions, code: str) -> NDArray[np.generic]:
    largest = _largest(code)
    repeats = gaps // largest
    numbers = np.full(gaps.size + int(repeats.sum()), largest, code)
    numbers[np.cumsum(repeats + 1) - 1] = gaps % largest
    return numbers


def _decode_gaps(index: memoryview, code: str) -> Positions:
    if len(index) % np.dtype(code).itemsize:
        raise BadDelta(f"{len(index)} bytes are no whole number of gaps")
    numbers = np.frombuffer(index, code)
    ends = numbers != _largest(code)
    if numbers.size and not ends[-1]:
        raise BadDelta("the last gap does not end")
    unchanged_before = np.cumsum(numbers, dtype=np.int64)[ends]
    return unchanged_before + np.arange(unchanged_before.size)


def _bitmap(positions: Positions, size: int) -> NDArray[np.uint8]:
    bits = np.zeros(size, np.bool_)
    bits[positions] = True
    return np.packbits(bits, bitorder="little")


def _decode_bitmap(index: memoryview, size: int) -> Positions:
    if len(index) != -(-size // 8):
        raise BadDelta(f"a bitmap of {len(index)} bytes for {size} values")
    return np.flatnonzero(np.unpackbits(np.frombuffer(index, np.uint8), count=size, bitorder="little"))


def _largest(code: str) -> int:
    return int(np.iinfo(code).max)
