"""A safetensors file mapped into this process: its tensors are views of the page cache, which all processes share.

The mapping is private: code that changes a tensor that it loads changes a copy of those pages. A version's file is
written under a temporary name, renamed once, never written again, and removed by its owner alone, which is harmless to
a mapping. A file that something else writes to or cuts is noticed by `check_unchanged`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from penstock.weight_sync.files.file_reader import StoredTensor, stored_tensors
from penstock.weight_sync.manifest import Manifest, WeightsRefused

MADV_POPULATE_READ = 22
"""Linux 5.14; Python has no name for it."""
Identity = list[int]
"""[device, inode, size, mtime in ns] of a file: another one, or one that was written to, has another identity."""


def identity_of(file: int | Path) -> Identity:
    """Returns the identity of an open file or a path; a link has its own. Raises `FileNotFoundError`."""
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file by name, in its order. A tensor keeps the mapping alive."""

    def __init__(self, descriptor: int, *, writable: bool = False) -> None:
        """Maps the file; changes reach it if `writable`. Raises `OSError`, and `ValueError` for a damaged header."""
        self._memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE)
        length = int.from_bytes(self._memory[:8], "little")
        at = 8 + length
        self._places: dict[str, tuple[StoredTensor, int]] = {}
        try:
            header = json.loads(self._memory[8:at])
            header.pop("__metadata__", None)
            for stored in stored_tensors(header, len(self._memory) - at):
                self._places[stored.name] = stored, at
                at += stored.nbytes
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is not a safetensors header: {error!r}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        stored, offset = self._places[name]
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        count = stored.nbytes // stored.dtype.itemsize
        flat = torch.frombuffer(self._memory, dtype=stored.dtype, count=count, offset=offset)
        return flat.reshape(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class MappedVersion(MappedTensors):
    """A verified version. Its descriptor is closed with it; tensors that are still used keep the mapping."""

    def __init__(self, manifest: Manifest, descriptor: int) -> None:
        """Maps every page of the file of `descriptor`, which the version owns from then on."""
        weakref.finalize(self, os.close, descriptor)
        self.version, self.state, self.descriptor = manifest.version, manifest.state, descriptor
        self.identity = identity_of(descriptor)
        super().__init__(descriptor)
        with contextlib.suppress(OSError):  # an older kernel: pages are mapped when they are read, in the load's pause
            self._memory.madvise(MADV_POPULATE_READ)

    @property
    def is_unchanged(self) -> bool:
        """True if nothing has written to the file, or cut it, since it was verified."""
        return identity_of(self.descriptor) == self.identity

    def check_unchanged(self) -> None:
        """Raises `WeightsRefused` if the file was written to or cut since it was verified."""
        if not self.is_unchanged:
            raise WeightsRefused(f"version {self.version}: its file was changed after it was verified")
