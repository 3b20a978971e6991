"""A delta as a file: safetensors with two arrays of bytes, and a table in ``__metadata__`` that says whose they are.

    {"penstock": "delta/1", "base_state": HEX, "changes": "[[name, encoding, index_bytes, value_bytes, xxh3], …]"}
    index    U8   every change's index, one behind the other
    values   U8   every change's new values, likewise

The checksum of a change covers its index and its values: damage is found, and named, before anything is applied.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from penstock.weight_sync.delta import ENCODINGS, BadDelta, Change, Encoding, apply_change, words_of
from penstock.weight_sync.errors import WeightsRefused
from penstock.weight_sync.manifest import raw_bytes
from penstock.weight_sync.tensor_file import DELTA, Section, Written, write_file

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One change, as it was read: bytes that nobody has checked yet."""

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
    parts: Sequence[Part]

    def verify(self) -> None:
        """Raises `WeightsRefused` naming the first tensor whose change is not what was written."""
        for part in self.parts:
            if (found := _checksum(part.index, part.values)) != part.xxh3:
                raise WeightsRefused(
                    f"{self.path}: the change of tensor {part.name!r} has checksum {found}, written was {part.xxh3}"
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


def write_delta(path: Path, changes: Mapping[str, Change], base_state: str, *, durable: bool) -> Written:
    """Raises `NoSpace`; there is no such file then."""
    index = {name: _bytes(change.index) for name, change in changes.items()}
    values = {name: _bytes(change.values) for name, change in changes.items()}
    table = [
        [name, change.encoding, len(index[name]), len(values[name]), _checksum(index[name], values[name])]
        for name, change in changes.items()
    ]
    metadata = {"penstock": DELTA, "base_state": base_state, "changes": json.dumps(table, separators=(",", ":"))}
    sections = [Section.of_bytes("index", list(index.values())), Section.of_bytes("values", list(values.values()))]
    return write_file(path, sections, metadata, durable=durable)


def read_delta(path: Path) -> Delta:
    """Raises `WeightsRefused` where this is no delta file, or one of a later format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            # The clones are what gets checked: pages of a mapped file could still change before they are applied.
            index, values = (raw_bytes(file.get_tensor(name).clone()) for name in ("index", "values"))
            return Delta(path, metadata["base_state"], _parts(json.loads(metadata["changes"]), index, values))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise WeightsRefused(f"cannot read the delta {path}: {error!r}") from error


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if (found := metadata.get("penstock")) != DELTA:
        raise WeightsRefused(f"{path} is in format {found!r}, this server reads {DELTA!r}")


def _parts(table: Sequence[tuple[str, Encoding, int, int, str]], index: memoryview, values: memoryview) -> list[Part]:
    """Raises `ValueError` where the table is not about exactly these bytes."""
    if any(entry[1] not in ENCODINGS or entry[2] < 0 or entry[3] < 0 for entry in table):
        raise ValueError("its table has an unknown encoding or a negative length")
    index_ends = list(itertools.accumulate((entry[2] for entry in table), initial=0))
    value_ends = list(itertools.accumulate((entry[3] for entry in table), initial=0))
    if (index_ends[-1], value_ends[-1]) != (len(index), len(values)):
        raise ValueError(
            f"its table is about {index_ends[-1]} + {value_ends[-1]} bytes, it has {len(index)} + {len(values)}"
        )
    return [
        Part(name, encoding, index[i : i + index_bytes], values[v : v + value_bytes], xxh3)
        for (name, encoding, index_bytes, value_bytes, xxh3), i, v in zip(table, index_ends, value_ends, strict=False)
    ]


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _checksum(index: memoryview, values: memoryview) -> str:
    digest = xxhash.xxh3_64(index)
    digest.update(values)
    return digest.hexdigest()
