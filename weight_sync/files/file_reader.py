"""Reads one published file: opened once, read whole, every byte counted in the checksum.

    open, check kind and length ─► header ─► each tensor, in pieces or in new memory ─► checksum of the whole file

The name of a file proves nothing: what was checked is the open file, never one that is opened again by its name.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import xxhash

from penstock.weight_sync.files.file_format import (
    CODES,
    PIECE_BYTES,
    raw_bytes,
    verify_checksum,
    verify_form,
    verify_names,
)
from penstock.weight_sync.manifest import ChainFile, Manifest, WeightsRefused

_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_published(file: ChainFile) -> int:
    """A descriptor of the file, which the caller closes.

    Raises `WeightsRefused` if there is none, or something else under its name: a link, a pipe, another length.
    """
    where = f"version {file.version}: {file.place}"
    try:
        # Not blocking: the open of a pipe would not return.
        descriptor = os.open(file.place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsRefused(f"{where}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size == file.bytes:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise WeightsRefused(f"{where} is not a regular file ({stat.filemode(status.st_mode)})")
    raise WeightsRefused(f"{where} has {status.st_size} bytes, the manifest says {file.bytes}")


class FileReader:
    """`tensors` or `streamed` first, then `verify_whole`: before that nothing of the file may be used.

    All of it raises `WeightsRefused` naming the file.
    """

    def __init__(self, file: ChainFile, descriptor: int | None = None) -> None:
        """`descriptor`: `open_published`'s, where the caller keeps it; it is read from the beginning."""
        self._file = file
        self._digest = xxhash.xxh3_64()
        self._source = open(open_published(file) if descriptor is None else os.dup(descriptor), "rb", buffering=0)  # noqa: SIM115
        try:
            self._source.seek(0)
            self.metadata: Mapping[str, str]
            self.metadata, self._stored = self._read_header()
        except BaseException:
            self._source.close()
            raise

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()

    @property
    def names(self) -> list[str]:
        return [stored.name for stored in self._stored]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in its own memory, in the file's order. Once."""
        for stored in self._stored:
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            self._read_into(raw_bytes(tensor))
            yield stored.name, tensor

    def streamed(self) -> Iterator[tuple[StoredTensor, Iterator[memoryview]]]:
        """Each tensor's bytes in pieces, in the file's order. Once, and all pieces of each: the next overwrites one."""
        buffer = memoryview(bytearray(PIECE_BYTES))
        for stored in self._stored:
            yield stored, self._pieces(stored.nbytes, buffer)

    def verify_whole(self) -> None:
        """Raises `WeightsRefused` unless all was read and is what was announced; manifests of old have no checksum."""
        actual = self._digest.hexdigest()
        if self._file.xxh3 and actual != self._file.xxh3:
            raise self._refused(f"has checksum {actual}, the manifest says {self._file.xxh3}")

    def _read_header(self) -> tuple[Mapping[str, str], list[StoredTensor]]:
        (length,) = struct.unpack("<Q", self._read(8)) if self._file.bytes >= 8 else (self._file.bytes,)
        if length > self._file.bytes - 8:
            raise self._refused("is no safetensors file")
        try:
            described: dict[str, Any] = json.loads(self._read(length))
            metadata = described.pop("__metadata__", {})
            return dict(metadata), stored_tensors(described, self._file.bytes - 8 - length)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._refused(f"has a damaged header: {error!r}") from error

    def _pieces(self, size: int, buffer: memoryview) -> Iterator[memoryview]:
        while size:
            piece = buffer[: min(size, len(buffer))]
            self._read_into(piece)
            size -= len(piece)
            yield piece

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        self._read_into(memoryview(buffer))
        return bytes(buffer)

    def _read_into(self, buffer: memoryview) -> None:
        at = 0
        while at < len(buffer):
            came = self._source.readinto(buffer[at : at + PIECE_BYTES])
            if not came:
                raise self._refused("was cut while it was read")
            self._digest.update(buffer[at : at + came])  # still in the processor's cache
            at += came

    def _refused(self, why: str) -> WeightsRefused:
        return WeightsRefused(f"version {self._file.version}: {self._file.place} {why}")


def verified_pieces(manifest: Manifest, descriptor: int) -> Iterator[tuple[StoredTensor, int, memoryview]]:
    """Yields a full version's file as (tensor, where the piece begins in it, piece); the next piece overwrites one.

    To be read to its end. Raises `WeightsRefused`, at the end too, unless all of it is what the manifest says.
    """
    with FileReader(manifest.files[-1], descriptor) as opened:
        verify_names(manifest, opened.names)
        for stored, pieces in opened.streamed():
            entry = manifest.entries[stored.name]
            verify_form(manifest.version, entry, stored.shape, stored.dtype)
            begin, digest = 0, xxhash.xxh3_64()
            for piece in pieces if stored.nbytes else [memoryview(b"")]:
                digest.update(piece)
                yield stored, begin, piece
                begin += len(piece)
            verify_checksum(manifest.version, entry, digest.hexdigest())
        opened.verify_whole()


def stored_tensors(described: Mapping[str, Any], size: int) -> list[StoredTensor]:
    """The entries in the order of their bytes. Raises `ValueError` unless these are all of the file's, without gaps."""
    at = 0
    stored = []
    for name, entry in sorted(described.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, end = entry["data_offsets"]
        tensor = StoredTensor(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if any(type(part) is not int or part < 0 for part in tensor.shape):
            raise ValueError(f"tensor {name!r} has shape {entry['shape']}")
        if begin != at or end - begin != tensor.nbytes:
            raise ValueError(f"tensor {name!r} is at {begin} to {end}")
        stored.append(tensor)
        at = end
    if at != size:
        raise ValueError(f"it describes {at} of {size} bytes")
    return stored
