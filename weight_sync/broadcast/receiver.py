"""A version received while the engine decodes: into spare memory, checked as it comes, loaded at the pause.

    receive(offer)   in a thread: bucket k from the group ── bucket k − 1: checksums, memory
    take(manifest)   the version, if all of its tensors are what the manifest says

One version is held at most: a broadcast that begins drops one that was received and not taken.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import closing
from typing import Generic, TypeVar

import torch

from penstock.weight_sync.broadcast.group import Membership
from penstock.weight_sync.broadcast.in_place import ENDED_EARLY, JoinedBroadcast, as_tensor
from penstock.weight_sync.broadcast.memory import SpareMemory, stream_header
from penstock.weight_sync.broadcast.offer import Offer
from penstock.weight_sync.files.file_format import verify_names
from penstock.weight_sync.files.mapped_version import MappedVersion
from penstock.weight_sync.manifest import (
    Manifest,
    TensorEntry,
    WeightsBroken,
    WeightsRefused,
    WeightsUnreachable,
    state_of,
)

Content = TypeVar("Content")


class _StagedVersion(ABC, Generic[Content]):
    """A received version. `receive` in one thread at a time, `take` in any."""

    def __init__(self) -> None:
        self._held: tuple[str, tuple[TensorEntry, ...], Content] | None = None
        """Name of the broadcast, its tensors, and their content."""
        self._lock = threading.Lock()
        self._membership = Membership()

    def receive(self, offer: Offer, worker: int = 0, device: torch.device | None = None) -> str:
        """Takes part in the broadcast; returns the state of the tensors that came, `state_of` them. Blocks.

        `device`: on which buckets arrive, if the broadcast goes from GPU to GPU.

        Raises `WeightsUnreachable` if the broadcast ended early, or memory is short: nothing of it is held.
        """
        with self._lock:
            self._held = None
        try:
            with closing(JoinedBroadcast(offer, self._membership, worker, device)) as joined:
                content = self._read(joined)
        except WeightsBroken as error:
            raise WeightsUnreachable(str(error)) from error
        except ENDED_EARLY as error:
            raise WeightsUnreachable(f"version {offer.version}: the broadcast ended early: {error}") from error
        with self._lock:
            self._held = offer.name, joined.entries, content
        return state_of(joined.entries)

    def _take(self, manifest: Manifest) -> Content:
        """Raises `WeightsUnreachable` if this broadcast is not held, `WeightsRefused` naming a tensor that differs."""
        with self._lock:
            staged = self._held
            if staged is not None and staged[0] == manifest.broadcast_name:
                self._held = None
        if staged is None or staged[0] != manifest.broadcast_name:
            raise WeightsUnreachable(f"version {manifest.version}: this server does not hold its broadcast")
        _, entries, content = staged
        verify_names(manifest, (entry.name for entry in entries))
        for entry in entries:
            if entry != (announced := manifest.entries[entry.name]):
                raise WeightsRefused(
                    f"version {manifest.version}: tensor {entry.name!r} came as {entry}, not as {announced}"
                )
        return content

    @abstractmethod
    def _read(self, joined: JoinedBroadcast) -> Content:
        """Reads the stream to its end. Raises `ENDED_EARLY`, `WeightsUnreachable`, `WeightsBroken`."""


class StagedWeights(_StagedVersion[dict[str, torch.Tensor]]):
    """A version in memory of one worker, which is reused: new memory costs more than the bytes that come into it."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: SpareMemory | None = None
        """Memory of the version received last, which may still be read."""

    def take(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Returns the tensors; the next version comes into their memory once none is left. Raises as `_take`."""
        return self._take(manifest)

    def _read(self, joined: JoinedBroadcast) -> dict[str, torch.Tensor]:
        # If it fails the memory is given up: what the group still writes must not reach the next version.
        offer, memory, self._memory = joined.offer, self._memory, None
        if memory is None or memory.nbytes != offer.nbytes or not memory.is_free:
            memory = SpareMemory(offer.nbytes)
        stream = memory.tensor()
        for _ in joined.buckets(stream.split(offer.bucket_bytes) if offer.nbytes else ()):
            pass
        self._memory = memory
        parts = stream.split([tensor.nbytes for tensor in offer.tensors])
        return {tensor.name: as_tensor(part, tensor) for tensor, part in zip(offer.tensors, parts, strict=True)}


class _SharedFile:
    """Memory that is a file; it goes with this object, or its `close`, and the versions that map it."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[os.write(self.descriptor, piece) :]


class StagedMemory(_StagedVersion[_SharedFile]):
    """A version in memory that is a safetensors file, received once for all processes of a server on one machine.

    A server's workers map the memory, or load its descriptor as a file: the wire brings each byte once, it is checked
    once, and lies in the machine's memory once.
    """

    def take(self, manifest: Manifest) -> MappedVersion:
        """Returns the version, whose memory goes with its last reader. Raises as `_take`."""
        file = self._take(manifest)
        return MappedVersion(manifest, os.dup(file.descriptor))

    def _read(self, joined: JoinedBroadcast) -> _SharedFile:
        file = _SharedFile(f"broadcast-{joined.offer.version}")
        try:
            file.write(memoryview(stream_header(joined.offer.tensors)))
            for bucket in joined.buckets():
                file.write(bucket)
        except BaseException:
            file.close()  # The error's traceback refers to it, and a holder of the error keeps half a version.
            raise
        return file
