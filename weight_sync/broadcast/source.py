"""A version's bytes in the trainer: each rank keeps a copy of its own shards, rank 0 fetches them bucket by bucket.

    training thread   take(v) on every rank: its shards, cast to the published dtype ── the next step begins
    rank 0's thread   buckets(v): asks each rank for its part of a bucket, one bucket ahead
    other ranks       answer_until_stopped(): until rank 0 says stop or is gone

The whole model is on no host: a rank has its own shards and rank 0 has three buckets beside them. A bucket is taken
from the copies or not at all: each answer says whether its rank still holds that version. So `take` never waits for
more than one bucket, and a stream of an older version ends with `Superseded`.

Where deltas are written, `take` also marks which values differ from the version before, which its copies were
(`ShareChanges`): beside its share a rank has its marks, a bit per value. Rank 0 asks each rank once what its changes
cost (`changes`), and fetches the marks of a bucket with the bucket (`marked_buckets`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from penstock.weight_sync.broadcast.memory import bucket_memory, spare_memory
from penstock.weight_sync.broadcast.offer import ITEM_BYTES, StreamTensor, stream_order
from penstock.weight_sync.broadcast.share_changes import (
    NOT_COMPARED,
    SUMMARY_WIDTH,
    ShareChanges,
    gaps_of,
    mark_bytes,
)
from penstock.weight_sync.broadcast.stream_places import Bucket, MarkedBucket, Part, Places, scatter
from penstock.weight_sync.files.delta import Gaps
from penstock.weight_sync.files.file_format import dtype_name

logger = logging.getLogger(__name__)
PING_S = 5.0
"""Rank 0 says that often that it is there: the others wait for it with a deadline."""
CLOSE_S = 60.0
_PING, _BUCKET, _STOP, _MARKS, _SUMMARY = range(5)


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of a version, and this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    published: torch.dtype
    rank_bytes: tuple[int, ...]
    """How much of it each rank has, in `published`: the parts in the order of the ranks are the tensor's bytes."""
    local: torch.Tensor
    """This rank's part, on any device and in any dtype. Not touched after `WeightSource.take`."""

    @property
    def dtype(self) -> str:
        return dtype_name(self.published)


class Superseded(Exception):
    """A rank holds the next version already."""


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """What the changes of a version cost."""

    base: int
    """The version before."""
    gaps: Sequence[Gaps]
    """Of each tensor, in the stream's order."""


class WeightSource:
    """Every rank has one. `take` is called by the training thread, all that streams by threads of rank 0."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        group: dist.ProcessGroup | None = None,
        wait_s: float = 600.0,
        *,
        finds_changes: bool = False,
    ) -> None:
        """`group`: gloo, of these ranks, used for nothing else. `wait_s`: for a rank that is behind.

        `finds_changes`: each version is compared with the one before. Equal on all ranks.
        """
        self.version: int | None = None
        """What the copies are of."""
        self.tensors: tuple[StreamTensor, ...] = ()
        """In the stream's order."""
        self._rank, self._world, self._group, self._wait_s = rank, world, group, wait_s
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """This rank's shards, in the stream's order."""
        self._buckets: list[torch.Tensor] = []
        """Two that are filled and sent in turn, and one for what comes in parts; empty while they are in use."""
        self._sizes: list[tuple[int, ...]] = []
        """Of each tensor, the bytes on each rank."""
        self._places = Places((), ())
        self._finds_changes = finds_changes
        self._changes = ShareChanges(None, ())
        """This rank's, of `version`."""
        self._changed = threading.Condition()
        """Held while copies are made or read."""
        self._wire = threading.Lock()
        """Held over each question and its answer."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, rank: int, world: int, timeout: timedelta, *, finds_changes: bool = False) -> WeightSource:
        """Of the ranks of the process group; a collective. `finds_changes` as in the constructor.

        With several, they have a gloo group for this alone, whose messages do not mix with those of steps, and a thread
        each: rank 0's keeps the others waiting, theirs answer it.
        """
        group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        source = cls(rank, world, group, timeout.total_seconds(), finds_changes=finds_changes)
        if world > 1:
            work = source._ping if rank == 0 else source.answer_until_stopped
            source._thread = threading.Thread(target=work, name="weights of this rank", daemon=True)
            source._thread.start()
        return source

    def close(self) -> None:
        """Rank 0 ends the others' threads; they wait for it, `CLOSE_S` at most."""
        self._closed.set()
        if self._thread is None:
            return
        if self._rank == 0:
            with contextlib.suppress(RuntimeError):  # a rank that is gone needs no word
                self.stop_others()
        self._thread.join(CLOSE_S)
        self._group = None

    def stop_others(self) -> None:
        """Rank 0: their `answer_until_stopped` return."""
        with self._wire:
            for rank in range(1, self._world):
                self._tell(rank, _STOP)

    def take(self, version: int, shards: Iterable[Shard]) -> None:
        """Copy them. Takes one tensor's memory more at most; what nothing else holds is freed on the way."""
        ordered = stream_order(shards)
        with self._changed:
            before, self.version = self.version, None
            if not self._lay_out(ordered) or not self._finds_changes:
                before = None
            self._changes = ShareChanges(None, ())  # the marks before are freed first
            counts = [each[self._rank] // item for each, item in zip(self._sizes, self._places.items, strict=True)]
            self._changes = ShareChanges(before, counts)
            at = 0
            ordered.reverse()
            while ordered:
                at = self._copy(ordered.pop(), len(counts) - len(ordered) - 1, at)
            self.version = version
            self._changed.notify_all()

    def _lay_out(self, ordered: Sequence[Shard]) -> bool:
        """Whether the copies lie as those of the version before."""
        tensors = tuple(StreamTensor(shard.name, shard.shape, shard.dtype) for shard in ordered)
        sizes = [shard.rank_bytes for shard in ordered]
        if tensors == self.tensors and sizes == self._sizes:
            return True
        self.tensors, self._sizes = tensors, sizes
        self._places = Places(sizes, [ITEM_BYTES[tensor.dtype] for tensor in tensors])
        total = sum(each[self._rank] for each in sizes)
        if len(self._bytes) != total:
            self._bytes = spare_memory(total)
        return False

    def _copy(self, shard: Shard, number: int, at: int) -> int:
        end = at + shard.rank_bytes[self._rank]
        if shard.local.numel() * shard.published.itemsize != end - at:
            raise ValueError(f"tensor {shard.name!r}: rank {self._rank} has {shard.local.numel()} of its values")
        if end > at:
            held = self._bytes[at:end].view(shard.published)
            self._changes.replace(number, held, shard.local.detach().reshape(-1))
        return end

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return self._places.total

    def buckets(self, version: int, bucket_bytes: int) -> Iterator[torch.Tensor]:
        """The stream, [bytes] uint8 in pieces; each is valid until the next is asked for. On rank 0.

        Raises `Superseded`, also at the end, after a bucket whose bytes may have changed while it was in use; and
        `RuntimeError` where a rank is gone.
        """
        for bucket in self._filled(version, bucket_bytes):
            yield bucket.bytes

    def changes(self, version: int) -> VersionChanges | None:
        """On rank 0. None where some rank did not compare `version` with the one that it had before.

        Raises `Superseded`, and `RuntimeError` where a rank is gone.
        """
        rows = self._summaries(version)
        bases = {int(each[0, 0]) for each in rows}
        if len(bases) > 1 or NOT_COMPARED in bases:
            return None
        found = [Gaps() for _ in self.tensors]
        for part in self._places.parts:
            gaps = gaps_of(rows[part.rank][1 + part.tensor].tolist())
            found[part.tensor] = found[part.tensor].followed_by(gaps.shifted(part.value))
        return VersionChanges(bases.pop(), found)

    def marked_buckets(self, version: int, bucket_bytes: int) -> Iterator[MarkedBucket]:
        """As `buckets`, with the marks of their values; of a version that has `changes`."""
        for bucket in self._filled(version, max(8, bucket_bytes // 8 * 8), marked=True):  # no value lies in two
            yield MarkedBucket(bucket.bytes, [bucket.marked_part(part) for part in bucket.parts])

    def _filled(self, version: int, bucket_bytes: int, *, marked: bool = False) -> Iterator[Bucket]:
        total = self.nbytes
        begins = range(0, total, bucket_bytes)
        if self._world == 1:
            for begin in begins:
                piece = self._bytes[begin : begin + bucket_bytes]
                bucket = Bucket(version, begin, piece, piece, marked=marked)
                if marked:
                    self._add_marks(bucket)
                yield bucket
                self._check(version)
            return
        three = self._three_buckets(min(bucket_bytes, total))
        *two, scratch = three
        wanted = [
            Bucket(version, begin, two[number % 2][: total - begin], scratch, marked=marked)
            for number, begin in enumerate(begins)
        ]
        wanted.reverse()
        with ThreadPoolExecutor(1, thread_name_prefix="next bucket") as ahead:
            pending = ahead.submit(self._gather, wanted.pop()) if wanted else None
            while pending is not None:
                ready = pending.result()
                pending = ahead.submit(self._gather, wanted.pop()) if wanted else None
                yield ready
        self._buckets = three

    def _three_buckets(self, nbytes: int) -> list[torch.Tensor]:
        """Those of the stream before, if it is at its end; a stream that breaks off gives its own up."""
        with self._wire:
            kept, self._buckets = self._buckets, []
        if not kept or len(kept[0]) != nbytes:
            kept = [bucket_memory(nbytes) for _ in range(3)]
        return kept

    def _gather(self, bucket: Bucket) -> Bucket:
        with self._wire:
            parts = self._places.within(bucket.begin, bucket.begin + len(bucket.bytes))
            for rank in sorted({part.rank for part in parts}):
                own = [part for part in parts if part.rank == rank]
                if rank == 0:
                    with self._changed:
                        self._check(bucket.version)
                        scatter(self._bytes[own[0].local : own[-1].local_end], own, bucket)
                else:
                    self._fetch_parts(rank, own, bucket)
        if bucket.marked:
            self._add_marks(bucket)
        return bucket

    def _fetch_parts(self, rank: int, parts: list[Part], bucket: Bucket) -> None:
        """A rank's parts of one bucket are one range of its copies."""
        first, last = parts[0].local, parts[-1].local_end
        if len(parts) == 1:
            at = parts[0].stream - bucket.begin
            self._fetch(rank, _BUCKET, bucket.version, first, bucket.bytes[at : at + last - first])
            return
        received = bucket.scratch[: last - first]
        self._fetch(rank, _BUCKET, bucket.version, first, received)
        scatter(received, parts, bucket)

    def _add_marks(self, bucket: Bucket) -> None:
        """Of a rank's parts: one range of its marks."""
        bucket.parts = self._places.within(bucket.begin, bucket.begin + len(bucket.bytes))
        with self._wire:
            for rank in sorted({part.rank for part in bucket.parts}):
                own = [part for part in bucket.parts if part.rank == rank]
                begin, end = own[0].mark // 8, mark_bytes(own[-1].mark + own[-1].nbytes // own[-1].item_bytes)
                received = torch.empty(end - begin, dtype=torch.uint8)
                self._fetch(rank, _MARKS, bucket.version, begin, received)
                bucket.marks[rank] = (8 * begin, received.numpy())

    def _summaries(self, version: int) -> list[NDArray[np.int64]]:
        """Of each rank. All are asked before the first answers: they count at once."""
        found = [torch.empty(1 + len(self.tensors), SUMMARY_WIDTH, dtype=torch.int64) for _ in range(self._world)]
        behind: list[Superseded] = []
        with self._wire:
            self._check_open()
            for rank in range(1, self._world):
                self._tell(rank, _SUMMARY, version, 0, found[rank].nbytes)
            for rank, received in enumerate(found):
                raw = received.view(torch.uint8).reshape(-1)
                try:
                    if rank == 0:
                        self._copy_own(_SUMMARY, version, 0, raw)
                    else:
                        self._receive(rank, version, raw)
                except Superseded as error:  # the answers of the others are still to be taken from the wire
                    behind.append(error)
        if behind:
            raise behind[0]
        return [one.numpy() for one in found]

    def _fetch(self, rank: int, kind: int, version: int, begin: int, target: torch.Tensor) -> None:
        """`target` [bytes] becomes what the rank has of that kind from `begin` on."""
        if rank == 0:
            self._copy_own(kind, version, begin, target)
            return
        self._check_open()
        self._tell(rank, kind, version, begin, begin + len(target))
        self._receive(rank, version, target)

    def _copy_own(self, kind: int, version: int, begin: int, target: torch.Tensor) -> None:
        with self._changed:
            self._check(version)
            target.copy_(self._kept(kind, begin, begin + len(target)))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Superseded("the trainer stops")

    def _receive(self, rank: int, version: int, target: torch.Tensor) -> None:
        held = torch.zeros(1, dtype=torch.int64)
        dist.recv(held, src=rank, group=self._group)
        if not held.item():
            raise Superseded(f"rank {rank} does not hold version {version} any more")
        dist.recv(target, src=rank, group=self._group)

    def _check(self, version: int) -> None:
        if self.version != version:
            raise Superseded(f"version {version} is not the newest any more")

    def _tell(self, rank: int, *words: int) -> None:
        dist.send(torch.tensor([*words, *[0] * (4 - len(words))], dtype=torch.int64), dst=rank, group=self._group)

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            if self._wire.acquire(blocking=False):
                try:
                    if self._closed.is_set():  # the others may have stopped: nobody would receive the ping
                        return
                    for rank in range(1, self._world):
                        self._tell(rank, _PING)
                except RuntimeError as error:
                    logger.error("another rank of the trainer does not take part in publishing: %s", error)
                    return
                finally:
                    self._wire.release()

    def answer_until_stopped(self) -> None:
        """The work of the other ranks' threads; also ends where rank 0 is gone."""
        words = torch.zeros(4, dtype=torch.int64)
        try:
            while True:
                dist.recv(words, src=0, group=self._group)
                kind, version, begin, end = words.tolist()
                if kind == _STOP:
                    return
                if kind != _PING:
                    self._answer(kind, version, begin, end)
        except RuntimeError as error:
            if not self._closed.is_set():
                logger.error("rank 0 of the trainer asks for no more weights: %s", error)

    def _answer(self, kind: int, version: int, begin: int, end: int) -> None:
        """Nothing changes the copies until they are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self.version is not None and self.version >= version, self._wait_s)
            held = self.version == version
            dist.send(torch.tensor([int(held)], dtype=torch.int64), dst=0, group=self._group)
            if held:
                dist.send(self._kept(kind, begin, end), dst=0, group=self._group)

    def _kept(self, kind: int, begin: int, end: int) -> torch.Tensor:
        """[end - begin] uint8."""
        if kind == _BUCKET:
            return self._bytes[begin:end]
        if kind == _MARKS:
            return self._changes.marks[begin:end]
        return self._changes.summary().view(torch.uint8).reshape(-1)[begin:end]
