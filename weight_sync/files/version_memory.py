"""All tensors of a version in one anonymous file of memory: written once, verified, sealed, then mapped by its readers.

    MemoryDraft     filled from files piece by piece, each counted in the checksums; changed by deltas; verified; sealed
    VersionMemory   read by name: a tensor is a view of a mapping, which goes when no tensor of it is left

Tensors lie in the order of their names, each at a multiple of `ALIGN`: both sides find them by the manifest alone. A
reader's mapping is private (copy on write): code that changes a tensor that it loads changes a copy of those pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import torch
import xxhash

from penstock.weight_sync.files.delta import read_delta
from penstock.weight_sync.files.file_format import (
    CODES,
    PIECE_BYTES,
    dtype_name,
    verify_checksum,
    verify_form,
    verify_names,
    verify_tensors,
)
from penstock.weight_sync.files.file_reader import FileReader
from penstock.weight_sync.manifest import ChainFile, Manifest, TensorEntry, WeightsRefused

ALIGN = 64
LEAST_WINDOW = 1 << 20
WINDOWS = 256
"""About: mappings of one version, each of which costs a descriptor while it is used."""
MADV_POPULATE_READ = 22
"""Linux 5.14; Python has no name for it."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_DTYPES = {dtype_name(dtype): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    bytes: int
    window: int
    """Number of the mapping that it is read through."""


@dataclass(frozen=True)
class MemoryLayout:
    """Of a version's memory; equal for versions of the same names, shapes and dtypes."""

    places: Mapping[str, TensorPlace]
    windows: tuple[tuple[int, int], ...]
    """(offset, bytes) of each mapping."""
    bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> MemoryLayout:
        """In the order of the names. Raises `WeightsRefused` for a dtype that no file can hold."""
        return cls._laid_out(manifest.version, sorted(manifest.tensors, key=lambda entry: entry.name), 0, ALIGN)

    @classmethod
    def packed(cls, version: int, entries: Iterable[TensorEntry], begin: int) -> MemoryLayout:
        """One after the other, from `begin` on, in the order given, in which items are aligned. Raises as `of`."""
        return cls._laid_out(version, entries, begin, 1)

    @classmethod
    def _laid_out(cls, version: int, entries: Iterable[TensorEntry], begin: int, align: int) -> MemoryLayout:
        sized = [(entry, _nbytes(version, entry)) for entry in entries]
        window_bytes = max(LEAST_WINDOW, sum(size for _, size in sized) // WINDOWS)
        places: dict[str, TensorPlace] = {}
        starts, offset = [begin], begin
        for entry, size in sized:
            if offset + size - starts[-1] > window_bytes and offset > starts[-1]:
                starts.append(offset)
            places[entry.name] = TensorPlace(entry.shape, _DTYPES[entry.dtype], offset, size, len(starts) - 1)
            offset += -(-size // align) * align
        return cls(places, tuple((first, end - first) for first, end in pairwise([*starts, offset])), offset)


def _nbytes(version: int, entry: TensorEntry) -> int:
    if entry.dtype not in _DTYPES or any(size < 0 for size in entry.shape):
        raise WeightsRefused(f"version {version}: tensor {entry.name!r} is {entry.dtype} of shape {list(entry.shape)}")
    values = 1
    for size in entry.shape:
        values *= size
    return values * _DTYPES[entry.dtype].itemsize


class _Window(mmap.mmap):
    """A mapping that can be referred to weakly."""


class TensorViews(Mapping[str, torch.Tensor]):
    """The tensors of a memory by name, each made when it is asked for."""

    def __init__(self, descriptor: int, layout: MemoryLayout, names: list[str], *, writable: bool) -> None:
        """`writable`: changes reach the memory; else they stay in this process."""
        self._descriptor, self._layout, self._names = descriptor, layout, names
        self._flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        self._windows: weakref.WeakValueDictionary[int, _Window] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._layout.places[name]
        if not place.bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        begin, _ = self._layout.windows[place.window]
        window = self._window(place.window)
        first = place.offset - begin + begin % mmap.ALLOCATIONGRANULARITY
        count = place.bytes // place.dtype.itemsize
        return torch.frombuffer(window, dtype=place.dtype, count=count, offset=first).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _window(self, number: int) -> _Window:
        window = self._windows.get(number)
        if window is None:
            begin, size = self._layout.windows[number]
            inside = begin % mmap.ALLOCATIONGRANULARITY
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            window = _Window(self._descriptor, size + inside, self._flags, protection, offset=begin - inside)
            self._windows[number] = window
        return window


class VersionMemory(TensorViews):
    """A verified version. Its descriptor is closed with it; tensors that are still used keep their mapping."""

    def __init__(self, manifest: Manifest, descriptor: int, layout: MemoryLayout) -> None:
        super().__init__(descriptor, layout, [entry.name for entry in manifest.tensors], writable=False)
        self.version, self.state, self.descriptor = manifest.version, manifest.state, descriptor
        self._mapped: list[_Window] = []
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def adopt(cls, manifest: Manifest, descriptor: int, layout: MemoryLayout) -> VersionMemory:
        """Memory that another process verified. Raises `ValueError` unless it is sealed and of the layout's size.

        The descriptor is the memory's from then on.
        """
        size = os.fstat(descriptor).st_size
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError("a file that cannot be sealed") from error
        if seals & SEALS != SEALS:
            raise ValueError("memory that is not sealed")
        if size != max(layout.bytes, 1):
            raise ValueError(f"{size} bytes, the version has {layout.bytes}")
        return cls(manifest, descriptor, layout)

    def map_all(self) -> None:
        """Map every page now and until `unmap`: what is left of it would be page faults in the pause of the load."""
        self._mapped = [self._window(number) for number, (_, size) in enumerate(self._layout.windows) if size]
        for window in self._mapped:
            with contextlib.suppress(OSError):  # an older kernel: pages are mapped when they are read
                window.madvise(MADV_POPULATE_READ)

    def unmap(self) -> None:
        """Tensors that are still used keep their part."""
        self._mapped = []

    def renamed(self, manifest: Manifest) -> VersionMemory:
        """The same memory under another manifest of the same content."""
        return VersionMemory(manifest, os.dup(self.descriptor), MemoryLayout.of(manifest))

    def has_form_of(self, manifest: Manifest) -> bool:
        """Whether names, shapes and dtypes are the same."""
        return self._layout == MemoryLayout.of(manifest)


class SealableMemory:
    """An anonymous file while it is written. A context: what is not sealed is freed at its end."""

    def __init__(self, name: str) -> None:
        """Raises `OSError` where there is no memory."""
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._owned = True
        self._end = 0
        """Where `append` continues."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            os.close(self.descriptor)

    def put(self, piece: memoryview, at: int) -> None:
        while piece:
            written = os.pwrite(self.descriptor, piece, at)
            piece, at = piece[written:], at + written

    def append(self, piece: memoryview) -> None:
        self.put(piece, self._end)
        self._end += len(piece)

    def seal(self) -> int:
        """The descriptor, which is the caller's; no process can change or cut the memory any more."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self._owned = False
        return self.descriptor


class MemoryDraft(SealableMemory):
    """A version's memory while it is written."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises `WeightsRefused`, `OSError` where there is no memory."""
        self._manifest = manifest
        self._layout = MemoryLayout.of(manifest)
        self._state: str | None = None
        """What the memory holds; None while it is nothing whole."""
        self._whole = False
        """Every tensor was compared with the manifest."""
        super().__init__(f"weights-{manifest.version}")
        os.ftruncate(self.descriptor, max(self._layout.bytes, 1))  # an empty file cannot be mapped

    def copy(self, base: VersionMemory) -> None:
        """Begin with `base`, of the same layout."""
        buffer = memoryview(bytearray(PIECE_BYTES))
        at = 0
        while came := os.preadv(base.descriptor, [buffer], at):
            self.put(buffer[:came], at)
            at += came
        self._state = base.state

    def apply(self, file: ChainFile, descriptor: int | None) -> None:
        """One file of the chain; `descriptor` as in `FileReader`. Raises `WeightsRefused`."""
        state, self._state, self._whole = self._state, None, False
        if file.base_version is not None:
            self._change(file, descriptor, state)
        else:
            self._fill(file, descriptor, own=file is self._manifest.files[-1])
        self._state = file.state

    def sealed(self) -> VersionMemory:
        """The version, every tensor compared with the manifest. Raises `WeightsRefused`."""
        if not self._whole:
            verify_tensors(self._manifest, self._views())
        return VersionMemory(self._manifest, self.seal(), self._layout)

    def _fill(self, file: ChainFile, descriptor: int | None, *, own: bool) -> None:
        """From a full file. Of the version's `own`, each tensor is compared with the manifest on the way."""
        with FileReader(file, descriptor) as opened:
            verify_names(self._manifest, opened.names)
            for stored, pieces in opened.streamed():
                entry = self._manifest.entries[stored.name]
                verify_form(self._manifest.version, entry, stored.shape, stored.dtype)
                digest, at = xxhash.xxh3_64(), self._layout.places[stored.name].offset
                for piece in pieces:
                    digest.update(piece)
                    self.put(piece, at)
                    at += len(piece)
                if own:
                    verify_checksum(self._manifest.version, entry, digest.hexdigest())
            opened.verify_whole()
        self._whole = own

    def _change(self, file: ChainFile, descriptor: int | None, state: str | None) -> None:
        delta = read_delta(file, descriptor)
        if delta.base_state != state:
            raise WeightsRefused(f"{file.place} changes other weights than those of version {file.base_version}")
        delta.apply(self._views())

    def _views(self) -> TensorViews:
        return TensorViews(self.descriptor, self._layout, list(self._layout.places), writable=True)
