"""Deltas: the values of a tensor that changed, bit by bit, in few bytes; and the file that holds them.

`delta_writer` writes it from the copies of the trainer's ranks, piece by piece; here it is read and applied.

Values are compared as words of their size, so that -0.0 and NaNs are exact. Positions are ascending, coded as:

    gaps8|16|32   per value the number of unchanged ones before it; the width's largest number L: add L and read on
    bitmap        one bit per value of the tensor
    whole         no index: all values follow

The file is safetensors with two byte arrays and a table in ``__metadata__``:

    {"penstock": "delta/1", "base_state": HEX, "changes": "[[name, encoding, index_bytes, value_bytes, xxh3], …]"}
    index    U8   the index of every change, concatenated
    values   U8   the new values of every change, concatenated

The checksum of a change covers its index and values: damage is found, and named, before anything is applied.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from penstock.weight_sync.files.file_format import DELTA, raw_bytes
from penstock.weight_sync.files.file_reader import FileReader
from penstock.weight_sync.manifest import ChainFile, WeightsRefused

Encoding = Literal["gaps8", "gaps16", "gaps32", "bitmap", "whole"]
Words = NDArray[np.generic]
Positions = NDArray[np.int64]
_GAP_TYPES: dict[Encoding, str] = {"gaps8": "<u1", "gaps16": "<u2", "gaps32": "<u4"}
_LARGEST = tuple(int(np.iinfo(code).max) for code in _GAP_TYPES.values())
WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by the bytes of a value."""
Tensors = Mapping[str, torch.Tensor]


class BadDelta(ValueError):
    """The bytes are no change of this tensor."""


def words_of(tensor: torch.Tensor) -> Words:
    """[N] the tensor's bits as integers of its item size; a view where the tensor is contiguous and on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(WORD_TYPES[tensor.element_size()]).numpy()


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


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between changes, which decide the coding of their places. For consecutive parts of a tensor see
    `followed_by`.
    """

    count: int = 0
    """Changed values."""
    first: int = 0
    """Place of the first of them."""
    last: int = 0
    repeats: tuple[int, ...] = (0,) * len(_LARGEST)
    """Number of gaps between them that hold the largest number of each width."""

    @classmethod
    def of(cls, positions: Positions) -> Gaps:
        """Return the gaps of ascending places."""
        if not positions.size:
            return cls()
        gaps = np.diff(positions) - 1
        widest = int(gaps.max(initial=0))
        repeats = tuple(int((gaps // largest).sum()) if widest >= largest else 0 for largest in _LARGEST)
        return cls(positions.size, int(positions[0]), int(positions[-1]), repeats)

    def followed_by(self, later: Gaps) -> Gaps:
        """Return the gaps of both, if all places of `later` are behind these."""
        if not (self.count and later.count):
            return self if self.count else later
        between = later.first - self.last - 1
        each = zip(self.repeats, later.repeats, _LARGEST, strict=True)
        repeats = tuple(mine + others + between // largest for mine, others, largest in each)
        return Gaps(self.count + later.count, self.first, later.last, repeats)

    def shifted(self, by: int) -> Gaps:
        """Every place so much further."""
        return Gaps(self.count, self.first + by, self.last + by, self.repeats) if self.count else self

    def index_bytes(self, size: int) -> dict[Encoding, int]:
        """Return the bytes of the index of a tensor of `size` values, by encoding."""
        costs: dict[Encoding, int] = {"bitmap": -(-size // 8)}
        for (encoding, code), repeats, largest in zip(_GAP_TYPES.items(), self.repeats, _LARGEST, strict=True):
            costs[encoding] = (self.count + repeats + self.first // largest) * np.dtype(code).itemsize
        return costs


class IndexCoder:
    """Codes the index of one tensor's changes from consecutive parts of its values."""

    def __init__(self, encoding: Encoding, size: int) -> None:
        """`size`: values of the tensor."""
        self._encoding, self._size = encoding, size
        self._last = -1
        self._end = 0
        self._bits = np.empty(0, np.bool_)
        """Fewer than eight that wait for the rest of their byte."""

    def add(self, positions: Positions, end: int) -> NDArray[np.generic]:
        """The next bytes of the index: `positions` are all changes from the last call's `end` to this one's."""
        begin, self._end = self._end, end
        if self._encoding == "bitmap":
            return self._packed(positions - begin, end - begin)
        if self._encoding == "whole" or not positions.size:
            return np.empty(0, np.uint8)
        gaps = np.diff(positions, prepend=self._last) - 1
        self._last = int(positions[-1])
        code = _GAP_TYPES[self._encoding]
        largest = np.iinfo(code).max
        repeats = gaps // largest
        numbers = np.full(gaps.size + int(repeats.sum()), largest, code)
        numbers[np.cumsum(repeats + 1) - 1] = gaps % largest
        return numbers

    def _packed(self, positions: Positions, count: int) -> NDArray[np.uint8]:
        waiting = self._bits.size
        bits = np.zeros(waiting + count, np.bool_)
        bits[:waiting] = self._bits
        bits[waiting + positions] = True
        whole = bits.size if self._end == self._size else bits.size // 8 * 8
        self._bits = bits[whole:]
        return np.packbits(bits[:whole], bitorder="little")


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """One tensor's change, before its bytes are known."""

    name: str
    encoding: Encoding
    index_bytes: int
    value_bytes: int

    @classmethod
    def of(cls, name: str, gaps: Gaps, size: int, item_bytes: int) -> PlannedChange | None:
        """The shortest code of a tensor of `size` values; None where none changed."""
        if not gaps.count:
            return None
        costs = gaps.index_bytes(size)
        encoding = min(costs, key=lambda encoding: costs[encoding])
        values = gaps.count * item_bytes
        if costs[encoding] + values >= size * item_bytes:
            return cls(name, "whole", 0, size * item_bytes)
        return cls(name, encoding, costs[encoding], values)

    @property
    def nbytes(self) -> int:
        return self.index_bytes + self.value_bytes


def decode_positions(encoding: Encoding, index: memoryview, count: int, size: int) -> Positions:
    """[count] ascending places below `size`. Raises `BadDelta` where the bytes say anything else."""
    if encoding == "bitmap":
        if len(index) != -(-size // 8):
            raise BadDelta(f"a bitmap of {len(index)} bytes for {size} values")
        positions = np.flatnonzero(np.unpackbits(np.frombuffer(index, np.uint8), count=size, bitorder="little"))
    else:
        code = _GAP_TYPES[encoding]
        if len(index) % np.dtype(code).itemsize:
            raise BadDelta(f"{len(index)} bytes are no whole number of gaps")
        numbers = np.frombuffer(index, code)
        ends = numbers != np.iinfo(code).max
        if numbers.size and not ends[-1]:
            raise BadDelta("the last gap does not end")
        unchanged_before = np.cumsum(numbers, dtype=np.int64)[ends]
        positions = unchanged_before + np.arange(unchanged_before.size)
    if positions.size != count:
        raise BadDelta(f"{positions.size} places for {count} values")
    if count and positions[-1] >= size:
        raise BadDelta(f"place {positions[-1]} in a tensor of {size} values")
    return positions


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One change, as it was read."""

    name: str
    encoding: Encoding
    index: memoryview
    values: memoryview
    xxh3: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta file in memory."""

    path: Path
    base_state: str
    """The state that it changes; on any other it makes no sense."""
    parts: Sequence[TensorChange]

    def verify(self) -> None:
        """Raises `WeightsRefused` naming the first tensor whose change is not what was written."""
        for part in self.parts:
            digest = xxhash.xxh3_64(part.index)
            digest.update(part.values)
            if (checksum := digest.hexdigest()) != part.xxh3:
                raise WeightsRefused(
                    f"{self.path}: the change of tensor {part.name!r} has checksum {checksum}, written was {part.xxh3}"
                )

    def apply(self, tensors: Tensors) -> None:
        """Change `tensors` in place; they must be contiguous and on the CPU. Raises `WeightsRefused` by tensor name."""
        for part in self.parts:
            if part.name not in tensors:
                raise WeightsRefused(
                    f"{self.path}: changes tensor {part.name!r}, which the version before does not have"
                )
            try:
                apply_change(words_of(tensors[part.name]), part.encoding, part.index, part.values)
            except BadDelta as error:
                raise WeightsRefused(f"{self.path}: the change of tensor {part.name!r}: {error}") from error


def delta_metadata(planned: Iterable[PlannedChange], base_state: str, checksums: Iterable[str]) -> dict[str, str]:
    """A file's, whose length depends on nothing but `planned`. `checksums`: xxh3 of each, index before values."""
    table = [
        [change.name, change.encoding, change.index_bytes, change.value_bytes, xxh3]
        for change, xxh3 in zip(planned, checksums, strict=True)
    ]
    return {"penstock": DELTA, "base_state": base_state, "changes": json.dumps(table, separators=(",", ":"))}


def read_delta(file: ChainFile, descriptor: int | None = None) -> Delta:
    """A delta whose every byte is what was announced; `descriptor` as in `FileReader`.

    Raises `WeightsRefused` if it is not, naming the tensor, and if it is in a later format.
    """
    with FileReader(file, descriptor) as opened:
        path, metadata = Path(file.place), opened.metadata
        if (form := metadata.get("penstock")) != DELTA:
            raise WeightsRefused(f"{path} is in format {form!r}, this server reads {DELTA!r}")
        sections = dict(opened.tensors())
        try:
            index, values = (raw_bytes(sections[name]) for name in ("index", "values"))
            delta = Delta(path, metadata["base_state"], _parts(json.loads(metadata["changes"]), index, values))
        except (KeyError, ValueError, TypeError) as error:
            raise WeightsRefused(f"cannot read the delta {path}: {error!r}") from error
        delta.verify()
        opened.verify_whole()
        return delta


def _parts(
    table: Sequence[tuple[str, Encoding, int, int, str]], index: memoryview, values: memoryview
) -> list[TensorChange]:
    """Raises `ValueError` where the table is not about exactly these bytes."""
    if any(entry[1] not in get_args(Encoding) or entry[2] < 0 or entry[3] < 0 for entry in table):
        raise ValueError("its table has an unknown encoding or a negative length")
    index_ends = list(itertools.accumulate((entry[2] for entry in table), initial=0))
    value_ends = list(itertools.accumulate((entry[3] for entry in table), initial=0))
    if (index_ends[-1], value_ends[-1]) != (len(index), len(values)):
        raise ValueError(
            f"its table is about {index_ends[-1]} + {value_ends[-1]} bytes, it has {len(index)} + {len(values)}"
        )
    return [
        TensorChange(name, encoding, index[i : i + index_bytes], values[v : v + value_bytes], xxh3)
        for (name, encoding, index_bytes, value_bytes, xxh3), i, v in zip(table, index_ends, value_ends, strict=False)
    ]
