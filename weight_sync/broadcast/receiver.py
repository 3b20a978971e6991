"""An engine's worker receives a version while it decodes: into spare memory, checked as it comes, loaded at the pause.

    receive(offer, worker)   in a thread: bucket k from the group, checksums of bucket k − 1
    take(manifest)           the tensors, if all of them are what the manifest says

One version is held at most: a broadcast that begins drops one that was received and not loaded. Its memory stays,
because new memory costs more than the bytes that come into it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from penstock.weight_sync.broadcast.group import BroadcastGroup, find_store, join_group
from penstock.weight_sync.broadcast.memory import SpareMemory
from penstock.weight_sync.broadcast.offer import Member, Offer, StreamDigests
from penstock.weight_sync.files.file_format import raw_bytes
from penstock.weight_sync.manifest import Manifest, TensorEntry, WeightsRefused, WeightsUnreachable, state_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Staged:
    name: str
    entries: tuple[TensorEntry, ...]
    tensors: dict[str, torch.Tensor]
    """Views into the memory of the stream."""


class StagedWeights:
    """Each worker has one. `receive` in one thread at a time, `take` in any."""

    def __init__(self) -> None:
        self._staged: _Staged | None = None
        self._memory: SpareMemory | None = None
        """Of the version received last, which may still be read."""
        self._lock = threading.Lock()

    def receive(self, offer: Offer, worker: int = 0, device: torch.device | None = None) -> str:
        """Takes part in the broadcast; returns the state of the tensors that came, `state_of` them. Blocks.

        `device`: on which buckets arrive, where the broadcast goes from GPU to GPU.

        Raises `WeightsUnreachable` where the broadcast ended early: nothing of it is kept.
        """
        with self._lock:
            # Where it fails the memory is given up: what the group still writes must not reach the next version.
            self._staged, memory, self._memory = None, self._memory, None
        try:
            if memory is None or memory.nbytes != offer.nbytes or not memory.is_free:
                memory = SpareMemory(offer.nbytes)
            staged = _receive(offer, worker, memory, device)
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            raise WeightsUnreachable(f"version {offer.version}: the broadcast ended early: {error}") from error
        with self._lock:
            self._staged, self._memory = staged, memory
        return state_of(staged.entries)

    def take(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Returns the version's tensors; the next version comes into their memory once none of them is left.

        Raises `WeightsUnreachable` where this broadcast is not held, `WeightsRefused` naming a tensor that differs.
        """
        with self._lock:
            staged = self._staged
            if staged is not None and staged.name == manifest.broadcast_name:
                self._staged = None
        if staged is None or staged.name != manifest.broadcast_name:
            raise WeightsUnreachable(f"version {manifest.version}: this worker does not hold its broadcast")
        check_staged(manifest, staged.entries)
        return staged.tensors


def _receive(offer: Offer, worker: int, memory: SpareMemory, device: torch.device | None) -> _Staged:
    stream = memory.tensor()
    buckets = stream.split(offer.bucket_bytes) if offer.nbytes else ()
    entries = receive_stream(offer, worker, buckets, device=device)
    return _Staged(offer.name, entries, dict(_tensors(stream, offer)))


def receive_stream(
    offer: Offer,
    worker: int,
    buckets: Iterable[torch.Tensor],
    keep: Callable[[memoryview], None] | None = None,
    device: torch.device | None = None,
) -> tuple[TensorEntry, ...]:
    """The stream into `buckets`, each [bytes] uint8; what came, in its order. Blocks.

    `device`: on which NCCL receives. A bucket is complete, and is given to `keep`, while the next one comes. Raises
    `RuntimeError`, `OSError`, `ValueError` where the broadcast ended early.
    """
    member, digests = offer.member(worker), StreamDigests(offer.tensors)

    def complete(bucket: memoryview) -> None:
        digests.update(bucket)
        if keep is not None:
            keep(bucket)

    with closing(join_offer(offer, member, device)) as group:
        before = memoryview(b"")
        for bucket in buckets:
            work = group.begin(bucket)
            try:
                complete(before)
            finally:
                work.wait()
            before = raw_bytes(bucket)
        complete(before)
        entries = digests.entries()
        group.say_done()
    return entries


def join_offer(offer: Offer, member: Member, device: torch.device | None) -> BroadcastGroup:
    """The group, once all members are there. Raises `RuntimeError`, and `OSError` naming the key to set."""
    try:
        store = find_store(offer.trainer, member)
    except RuntimeError as error:
        raise OSError(
            f"this server does not reach the group at {offer.trainer}:{member.port}; set rollout.weights_host to an "
            f"address of the trainer that servers reach, and let them connect to all of its ports: {error}"
        ) from error
    return join_group(store, member, offer.here, device)


def _tensors(stream: torch.Tensor, offer: Offer) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0
    for tensor in offer.tensors:
        piece = stream[at : at + tensor.nbytes]
        yield tensor.name, piece.view(getattr(torch, tensor.dtype)).view(tensor.shape)
        at += tensor.nbytes


def check_staged(manifest: Manifest, entries: Iterable[TensorEntry]) -> None:
    """Names, shapes, dtypes and checksums, and that none is missing. Raises `WeightsRefused`."""
    wanted, found = manifest.entries, {entry.name: entry for entry in entries}
    for name in sorted(wanted.keys() ^ found.keys()):
        problem = "is missing" if name in wanted else "is not in the manifest"
        raise WeightsRefused(f"version {manifest.version}: tensor {name!r} {problem}")
    for name, entry in wanted.items():
        if found[name] != entry:
            raise WeightsRefused(f"version {manifest.version}: tensor {name!r} came as {found[name]}, not as {entry}")
