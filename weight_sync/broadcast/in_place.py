"""A worker's place in a broadcast, and a version received in place: under the engine's pause, without a second model.

    join             in a thread, while decoding continues: the groups are complete, no byte has come
    the engine pauses
    buckets          bucket k from the senders ── bucket k − 1: checksums, into the parameters
    entries          what came, once all of it came; the engine continues when that was announced

The first bucket that is handed out ends what the engine held. A broadcast that ends after it leaves half of one version
and half of another: `WeightsBroken`, where one that ends before it is `WeightsUnreachable` and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

import torch

from penstock.weight_sync.broadcast.group import Membership, find_store
from penstock.weight_sync.broadcast.memory import bucket_memory, two_buckets
from penstock.weight_sync.broadcast.offer import ITEM_BYTES, Offer, StreamDigests, StreamTensor, sending_ranks
from penstock.weight_sync.broadcast.stream_places import Bucket, Places
from penstock.weight_sync.files.file_format import raw_bytes
from penstock.weight_sync.files.file_reader import verified_pieces
from penstock.weight_sync.manifest import Manifest, TensorEntry, WeightsBroken, WeightsUnreachable

ENDED_EARLY = (RuntimeError, OSError, ValueError, MemoryError)
"""Exceptions of a group with a member that is gone or silent, or whose memory is not available."""


class JoinedBroadcast:
    """One worker's place in a version's broadcast. One thread at a time uses it; `close` ends it in any case."""

    def __init__(
        self,
        offer: Offer,
        membership: Membership,
        worker: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Blocks until all members are there.

        Args:
            membership: the worker's groups, which stand for the next broadcast once all of this one came.
            device: on which NCCL receives.

        Raises `WeightsUnreachable` where one does not come.
        """
        self.offer = offer
        self.entries: tuple[TensorEntry, ...] = ()
        """Received entries, in the stream's order; empty until all of it arrived."""
        self._begun = self._whole = False
        """A bucket was handed out; all of them came."""
        self._membership = membership
        try:
            _meet(self._membership, offer, worker, device)
        except ENDED_EARLY as error:
            raise WeightsUnreachable(self._ended(error)) from error

    def buckets(self, memory: Iterable[torch.Tensor] | None = None) -> Iterator[memoryview]:
        """The stream, [bytes] in pieces, to be read to its end. Once. Blocks.

        `memory`: what the pieces come into, [bytes] uint8 each; by default each piece is valid until the next is asked
        for. Raises `WeightsUnreachable` if it ends before the first one, else `WeightsBroken`.
        """
        digests = StreamDigests(self.offer.tensors)
        try:
            with closing(self), ThreadPoolExecutor(1) as beside:
                for bucket in self._received(memory):
                    digested = beside.submit(digests.update, bucket)
                    self._begun = True
                    yield bucket
                    digested.result()
                entries = digests.entries()
                self._membership.groups[0].say_done(self.offer.name)
                self.entries, self._whole = entries, True
        except ENDED_EARLY as error:
            kind = WeightsBroken if self._begun else WeightsUnreachable
            raise kind(self._ended(error)) from error

    def close(self) -> None:
        """Leave the groups, unless all came."""
        if not self._whole:
            self._membership.leave()

    def _received(self, memory: Iterable[torch.Tensor] | None) -> Iterator[memoryview]:
        offer, groups, begin = self.offer, self._membership.groups, 0
        items = tuple(ITEM_BYTES[tensor.dtype] for tensor in offer.tensors)
        places = _places(offer.splits, offer.split_of, items, offer.orders)
        scratch = bucket_memory(min(offer.bucket_bytes, offer.nbytes)) if len(groups) > 1 else torch.empty(0)
        before: memoryview | None = None
        for target in two_buckets(offer.nbytes, offer.bucket_bytes) if memory is None else memory:
            bucket = Bucket(offer.version, begin, target, scratch)
            begin += len(target)
            ranges = bucket.ranges(places.within(bucket.begin, begin))
            transfers = [groups[one.rank].begin(one.memory) for one in ranges]
            if before is not None:
                yield before
            for transfer, one in zip(transfers, ranges, strict=True):
                transfer.wait()
                bucket.place(one)
            before = raw_bytes(target)
        if before is not None:
            yield before

    def _ended(self, error: BaseException) -> str:
        return f"version {self.offer.version}: the broadcast ended early: {error}"


@lru_cache(1)
def _places(
    splits: tuple[tuple[int, ...], ...],
    split_of: tuple[int, ...],
    items: tuple[int, ...],
    orders: tuple[tuple[int, ...], ...],
) -> Places:
    """Return the places of a stream's bytes on the ranks of the trainer; those of the next version lie as these."""
    of_splits = orders or ((),) * len(splits)
    return Places([splits[number] for number in split_of], items, [of_splits[number] for number in split_of])


def _meet(membership: Membership, offer: Offer, worker: int, device: torch.device | None) -> None:
    """The group of each sending rank, once all members are there. Raises `RuntimeError`, and `OSError` naming the key
    to set."""
    member = offer.member(worker)

    def store() -> torch.distributed.TCPStore:
        try:
            return find_store(offer.trainer, member)
        except RuntimeError as error:
            raise OSError(
                f"this server does not reach the group at {offer.trainer}:{member.port}; set rollout.weights_host to "
                f"an address of the trainer that servers reach, and let them connect to all of its ports: {error}"
            ) from error

    places = [(sender, member.in_group(sender)) for sender in sending_ranks(offer.splits)]
    membership.meet(offer.name, member, places, store, host=offer.here, device=device)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Consecutive bytes of one tensor of a stream."""

    tensor: StreamTensor
    begin: int
    """Their offset in the tensor."""
    bytes: memoryview

    @property
    def is_last(self) -> bool:
        return self.begin + len(self.bytes) == self.tensor.nbytes

    def write(self, target: torch.Tensor) -> None:
        """`target`: the tensor's bytes, [tensor.nbytes] uint8, in host memory."""
        if len(self.bytes):
            source = torch.frombuffer(self.bytes, dtype=torch.uint8)
            target[self.begin : self.begin + len(self.bytes)].copy_(source)


def tensor_parts(tensors: Iterable[StreamTensor], buckets: Iterable[memoryview]) -> Iterator[TensorPart]:
    """The buckets of a stream, cut at its tensors; of a tensor without a byte one empty part. Reads them to their end.

    Raises `ValueError` for a stream of another length.
    """
    source, rest = iter(buckets), memoryview(b"")
    for tensor in tensors:
        begin = 0
        while True:
            if not rest and begin < tensor.nbytes:
                rest = next(source, rest)
                if not rest:
                    raise ValueError(f"the stream ends within tensor {tensor.name!r}")
            part, rest = rest[: tensor.nbytes - begin], rest[tensor.nbytes - begin :]
            yield TensorPart(tensor, begin, part)
            begin += len(part)
            if begin == tensor.nbytes:
                break
    if rest or next(source, None) is not None:
        raise ValueError("the stream is longer than its tensors")


def whole_tensors(tensors: Sequence[StreamTensor], buckets: Iterable[memoryview]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor), each in separate host memory, which goes with its last reader. Reads the stream to its end."""
    memory = torch.empty(0, dtype=torch.uint8)
    for part in tensor_parts(tensors, buckets):
        if not part.begin:
            memory = torch.empty(part.tensor.nbytes, dtype=torch.uint8)
        part.write(memory)
        if part.is_last:
            yield part.tensor.name, as_tensor(memory, part.tensor)
            memory = torch.empty(0, dtype=torch.uint8)


def as_tensor(memory: torch.Tensor, tensor: StreamTensor) -> torch.Tensor:
    """`memory` [tensor.nbytes] uint8 as that tensor; a view."""
    return memory.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def file_parts(manifest: Manifest, descriptor: int) -> Iterator[TensorPart]:
    """A full version's file, `open_published`, as the parts of its tensors; to be read to its end.

    Raises `WeightsRefused`, at the end too, unless all of it is what the manifest says.
    """
    for stored, begin, piece in verified_pieces(manifest, descriptor):
        entry = manifest.entries[stored.name]
        yield TensorPart(StreamTensor(entry.name, entry.shape, entry.dtype), begin, piece)


def can_stream(manifest: Manifest) -> bool:
    """Return True if `file_parts` reads it: one file, whole, of dtypes that streams have."""
    return len(manifest.files) == 1 and all(entry.dtype in ITEM_BYTES for entry in manifest.tensors)
