"""A model folder's weights as its files say they are, without loading a byte of them.

A ``.safetensors`` file begins with the length of its header (8 bytes, little endian) and the header, JSON: name →
dtype, shape and place of every tensor (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""
LFS = b"version https://git-lfs"
AGAIN = "download the model again, for example with `huggingface-cli download NAME --local-dir FOLDER`"


class BadModel(ValueError):
    """What is wrong with a file of the model, and in `mend` what to do."""

    def __init__(self, problem: str, mend: str = AGAIN) -> None:
        super().__init__(problem)
        self.mend = mend


@dataclass(frozen=True, slots=True)
class Weights:
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int
    """Of the files."""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def read_weights(folder: Path) -> Weights | None:
    """None where there is no such file. Raises `BadModel` for a shard that is missing, cut short or no weights."""
    files = _shards(folder)
    if not files:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        header = _read_header(file)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    lost = sorted(_indexed(folder).keys() - shapes.keys())
    if lost:
        raise BadModel(f"{INDEX} names {lost[0]} and {len(lost) - 1} more tensors that no file has")
    return Weights(shapes, sum(file.stat().st_size for file in files))


def _shards(folder: Path) -> list[Path]:
    indexed = sorted(set(_indexed(folder).values()))
    missing = [name for name in indexed if not (folder / name).is_file()]
    if missing:
        raise BadModel(
            f"{len(missing)} of {len(indexed)} shards that {INDEX} names are missing: {', '.join(missing[:5])}"
        )
    return [folder / name for name in indexed] or sorted(folder.glob("*.safetensors"))


def _indexed(folder: Path) -> Mapping[str, str]:
    """Tensor → file; empty for a model of one file."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    try:
        names: Mapping[str, str] = json.loads(file.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadModel(f"{INDEX} cannot be read: {error}") from error
    return names


def _read_header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        if first + opened.read(len(LFS) - 8) == LFS:
            raise BadModel(f"{file.name} is a pointer of git-lfs, not the weights", "run `git lfs pull` in the folder")
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size, MOST_HEADER_BYTES):
            raise BadModel(f"{file.name} is no .safetensors file, or cut short: {size} bytes")
        opened.seek(8)
        header = _parsed(file, opened.read(length))
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise BadModel(f"{file.name} is cut short: {size} of {end} bytes")
    return header


def _parsed(file: Path, header: bytes) -> dict[str, Any]:
    try:
        found = json.loads(header)
        found.pop("__metadata__", None)
        for entry in found.values():
            entry["shape"], entry["data_offsets"][1]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadModel(f"the header of {file.name} cannot be read: {error}") from error
    checked: dict[str, Any] = found
    return checked
