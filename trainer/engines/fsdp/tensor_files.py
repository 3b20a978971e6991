"""The safetensors of a model folder, read a slice at a time.

    TensorFiles(folder) ─► headers of all files ─► read_into(name, where, tensor)     pieces of `PIECE_BYTES`

Nothing is mapped: pages of a mapped file count as memory of the process that touched them, and a file that is cut
while it is read is an error here and no SIGBUS.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.job import BadJob
from penstock.weight_sync import stored_tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PIECE_BYTES = 4 << 20
MOST_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would choose; none if the folder has no safetensors. Raises `BadJob`
    for a file that the index names and that is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadJob(f"{folder / INDEX} cannot be read: {error!r}; download the model again") from error
    lost = [name for name in names if not (folder / name).is_file()]
    if lost:
        raise BadJob(f"{folder} lacks {lost[0]}, one of the {len(names)} files that {INDEX} names; download it again")
    return [folder / name for name in names]


class TensorFiles:
    """All of a model's. Raises `BadJob` for a file that is not safetensors, or is cut short."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.places: Mapping[str, TensorPlace] = {name: place for file in files for name, place in _places(file)}
        self._open = ExitStack()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._descriptors.clear()
        self._open.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self.places.items()}

    def read(self, name: str) -> Tensor:
        """All of a tensor, in the file's dtype."""
        place = self.places[name]
        whole = torch.empty(place.shape, dtype=place.dtype)
        self._read(place, place.offset, whole)
        return whole

    def read_into(self, name: str, where: Sequence[slice], target: Tensor) -> None:
        """The part `where` (a slice with start and stop of every dimension) of a tensor, cast to `target`'s dtype."""
        place = self.places[name]
        if not place.shape:
            target.copy_(self.read(name))
            return
        rows, others = where[0], tuple(where[1:])
        row_bytes = math.prod(place.shape[1:]) * place.dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        piece = torch.empty((min(step, rows.stop - rows.start), *place.shape[1:]), dtype=place.dtype)
        for start in range(rows.start, rows.stop, step):
            read = piece[: min(step, rows.stop - start)]
            self._read(place, place.offset + start * row_bytes, read)
            target[start - rows.start : start - rows.start + len(read)].copy_(read[(slice(None), *others)])

    def _read(self, place: TensorPlace, offset: int, target: Tensor) -> None:
        """`target` is contiguous and on the host."""
        remaining = memoryview(target.reshape(-1).view(torch.uint8).numpy().data)
        descriptor = self._descriptor(place.file)
        while remaining:
            count = os.preadv(descriptor, [remaining], offset)
            if not count:
                raise BadJob(f"{place.file} was cut while it was read; download the model again")
            remaining, offset = remaining[count:], offset + count

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, descriptor)
            self._descriptors[file] = descriptor
        return self._descriptors[file]


def _places(file: Path) -> Iterator[tuple[str, TensorPlace]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise BadJob(f"{file} is not a safetensors file, or cut short: {size} bytes; download the model again")
        header = opened.read(length)
    try:
        described: dict[str, Any] = json.loads(header)
        described.pop("__metadata__", None)
        offset = 8 + length
        for stored in stored_tensors(described, size - offset):
            yield stored.name, TensorPlace(file, stored.dtype, stored.shape, offset)
            offset += stored.nbytes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadJob(f"the header of {file} cannot be read: {error!r}; download the model again") from error
