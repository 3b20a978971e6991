"""Ordinary safetensors, written whole or not at all, with what is needed to check the file by itself.

The file appears under its name by an atomic rename and is never written again: a reader sees a whole version or none;
a writer that dies in the middle leaves only a ``.tmp`` that the next one removes. Its mode is 0600. ``__metadata__``
says what it is:

    full    {"penstock": "full/1", "xxh3": "{name: hex}"}
    delta   {"penstock": "delta/1", …}                       see `delta`
    adapter {"penstock": "adapter/1", "xxh3": "{name: hex}", "adapter": "{config, base}"}   see `lora`
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import xxhash

from penstock.common import atomic_path, open_private
from penstock.weight_sync.manifest import Manifest, TensorEntry, WeightsRefused

HEADROOM_BYTES = 16 << 20
FULL = "full/1"
DELTA = "delta/1"
ADAPTER = "adapter/1"
PIECE_BYTES = 1 << 20
NamedTensors = Iterable[tuple[str, torch.Tensor]]
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NoSpace(OSError):
    """The folder's file system cannot hold another version; the message says where, how much is needed and free."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as a reader must find it under `path`."""

    path: Path
    bytes: int
    xxh3: str
    """Checksum of the whole file, as 16 hex digits."""


@dataclass(frozen=True, slots=True)
class Section:
    """One named array of a file, in the pieces that it is written from."""

    name: str
    code: str
    """safetensors' name of the dtype."""
    shape: tuple[int, ...]
    nbytes: int
    pieces: Iterable[memoryview]
    """Gone through once, when their turn to be written comes."""

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor) -> Section:
        return cls(name, CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, [raw_bytes(tensor)])

    @classmethod
    def computed(cls, name: str, dtype: torch.dtype, shape: Sequence[int], make: Callable[[], torch.Tensor]) -> Section:
        """A tensor that `make` gives once its turn comes, of that dtype and shape."""
        pieces = (raw_bytes(make()) for _ in range(1))
        return cls(name, CODES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize, pieces)


def write_file(path: Path, sections: list[Section], metadata: Mapping[str, str], *, durable: bool) -> WrittenFile:
    """All of `sections` under `path`, at once. Raises `NoSpace`; if it raises, no such file exists.

    `sections` is emptied on the way: a tensor with no other owner is freed once it is written.
    """
    header = file_header(sections, metadata)
    size, digest = len(header) + sum(section.nbytes for section in sections), xxhash.xxh3_64(header)
    sections.reverse()
    with new_file(path, size, durable=durable) as file:
        file.write(header)
        while sections:
            for piece in sections.pop().pieces:
                file.write(piece)
                digest.update(piece)
    return WrittenFile(path, size, digest.hexdigest())


def file_header(sections: Sequence[Section], metadata: Mapping[str, str]) -> bytes:
    """safetensors: length (u64 LE), then JSON padded with spaces so that the data starts 8-aligned."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for section in sections:
        if section.name in described:
            raise ValueError(f"tensor {section.name!r} is given twice")
        span = [offset, offset + section.nbytes]
        described[section.name] = {"dtype": section.code, "shape": list(section.shape), "data_offsets": span}
        offset += section.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextlib.contextmanager
def new_file(path: Path, size: int, *, durable: bool) -> Iterator[IO[bytes]]:
    """Opens a file that appears under `path` at the end of the block, whole, and not at all if the block raises.

    Raises `NoSpace` if `size` bytes do not fit, also if another process takes the room meanwhile.
    """
    if shutil.disk_usage(path.parent).free < size + HEADROOM_BYTES:
        raise _no_space(path.parent, size)
    try:
        with atomic_path(path, durable=durable) as temporary, open_private(temporary, "x+b") as file:
            yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _no_space(path.parent, size) from error


def _no_space(directory: Path, size: int) -> NoSpace:
    free = shutil.disk_usage(directory).free
    return NoSpace(
        errno.ENOSPC,
        f"{directory} has {free >> 20} MiB free, one version of the weights needs {(size + HEADROOM_BYTES) >> 20}"
        " MiB; free some, or take another place with rollout.weight_transport",
    )


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order, [nbytes]; a view where the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-64 of the raw bytes, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor.cpu()))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of `tensor` on the CPU; if it is floating-point, in `dtype`.

    It is cast on its own device: otherwise float32 crosses the bus, and one CPU thread casts it.
    """
    tensor = tensor.detach()
    target = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(target, copy=True) if tensor.is_cpu else tensor.to(target).cpu()


def describe(name: str, tensor: torch.Tensor) -> TensorEntry:
    """The manifest's entry of a tensor; reads all of its bytes."""
    return TensorEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor))


def verify_names(manifest: Manifest, names: Iterable[str]) -> None:
    """Raises `WeightsRefused` naming the first tensor that only one side has."""
    announced, present = manifest.entries.keys(), set(names)
    if missing := sorted(announced - present):
        raise WeightsRefused(f"version {manifest.version}: tensor {missing[0]!r} is missing")
    if extra := sorted(present - announced):
        raise WeightsRefused(f"version {manifest.version}: tensor {extra[0]!r} is not in the manifest")


def verify_tensor(version: int, entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Raises `WeightsRefused` naming the tensor if its shape, dtype or bytes differ from the manifest's entry."""
    verify_form(version, entry, tensor.shape, tensor.dtype)
    verify_checksum(version, entry, checksum(tensor))


def verify_form(version: int, entry: TensorEntry, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises `WeightsRefused` naming the tensor if these are not the manifest's."""
    name = f"version {version}: tensor {entry.name!r}"
    if tuple(shape) != entry.shape:
        raise WeightsRefused(f"{name} has shape {list(shape)}, the manifest says {list(entry.shape)}")
    if dtype_name(dtype) != entry.dtype:
        raise WeightsRefused(f"{name} is {dtype_name(dtype)}, the manifest says {entry.dtype}")


def verify_checksum(version: int, entry: TensorEntry, actual: str) -> None:
    """Raises `WeightsRefused` naming the tensor if its bytes have another checksum than the manifest's."""
    if actual != entry.xxh3:
        raise WeightsRefused(
            f"version {version}: tensor {entry.name!r} has checksum {actual}, the manifest says {entry.xxh3}"
        )


def verify_tensors(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `WeightsRefused` unless names, shapes, dtypes and bytes are exactly the manifest's."""
    verify_names(manifest, tensors)
    for name, entry in manifest.entries.items():
        verify_tensor(manifest.version, entry, tensors[name])


class PartialFile:
    """A file being received: the bytes so far and their checksum. `close` keeps them for the next attempt."""

    def __init__(self, path: Path) -> None:
        """Raises `NotPrivate` where `path` is not this user's file."""
        self.path = path
        self._digest = xxhash.xxh3_64()
        self.length = 0
        self._file = open_private(path, "a+b", buffering=0)
        self._file.seek(0)
        while piece := self._file.read(PIECE_BYTES):  # of an earlier life
            self._count(piece)

    def append(self, piece: bytes | memoryview) -> None:
        """Raises `OSError` if the disk is full."""
        remaining = memoryview(piece)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]
        self._count(piece)

    @property
    def xxh3(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _count(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self.length += len(piece)
