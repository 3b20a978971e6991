"""A broadcast received once for all processes of a server on one machine: memory that is a safetensors file.

    receive(offer)   in a thread, while the engine decodes: bucket k from the group ── bucket k − 1: checksums, memory
    take(manifest)   the version, if all of its tensors are what the manifest says

A server's workers map the memory, or load its descriptor as a file: the wire brings each byte once, it is checked once,
and lies in the machine's memory once. One version is held at most: a broadcast that begins drops one that was received
and not taken.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field

import torch

from penstock.weight_sync.broadcast.memory import stream_header, two_buckets
from penstock.weight_sync.broadcast.offer import Offer
from penstock.weight_sync.broadcast.receiver import check_staged, receive_stream
from penstock.weight_sync.files.mapped_version import MappedVersion
from penstock.weight_sync.manifest import Manifest, TensorEntry, WeightsUnreachable, state_of


@dataclass(frozen=True)
class _Received:
    name: str
    """Of the broadcast."""
    entries: tuple[TensorEntry, ...]
    descriptor: int = field(repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)


class StagedMemory:
    """A server's machine has one. `receive` in one thread at a time, `take` in any."""

    def __init__(self) -> None:
        self._received: _Received | None = None
        self._lock = threading.Lock()

    def receive(self, offer: Offer, device: torch.device | None = None) -> str:
        """Take part in the broadcast; the state of the tensors that came, `state_of` them. Blocks.

        `device`: on which buckets arrive, where the broadcast goes from GPU to GPU.

        Raises `WeightsUnreachable` where the broadcast ended early, or there is no memory: nothing of it is kept.
        """
        with self._lock:
            self._received = None
        try:
            received = _received(offer, device)
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            raise WeightsUnreachable(f"version {offer.version}: the broadcast ended early: {error}") from error
        with self._lock:
            self._received = received
        return state_of(received.entries)

    def take(self, manifest: Manifest) -> MappedVersion:
        """The version, whose memory goes with its last reader.

        Raises `WeightsUnreachable` where this broadcast is not held, `WeightsRefused` naming a tensor that differs.
        """
        with self._lock:
            received = self._received
            if received is not None and received.name == manifest.broadcast_name:
                self._received = None
        if received is None or received.name != manifest.broadcast_name:
            raise WeightsUnreachable(f"version {manifest.version}: this server does not hold its broadcast")
        check_staged(manifest, received.entries)
        return MappedVersion(manifest, os.dup(received.descriptor))


def _received(offer: Offer, device: torch.device | None) -> _Received:
    memory = os.memfd_create(f"broadcast-{offer.version}", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", buffering=0, closefd=False) as file:

            def keep(piece: memoryview) -> None:
                while piece:
                    piece = piece[file.write(piece) :]

            keep(memoryview(stream_header(offer.tensors)))
            entries = receive_stream(offer, 0, two_buckets(offer.nbytes, offer.bucket_bytes), keep, device)
        return _Received(offer.name, entries, memory)
    except BaseException:
        os.close(memory)
        raise
