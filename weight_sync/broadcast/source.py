"""A version's bytes in the trainer: each rank keeps a copy of its shards, rank 0 gets them bucket by bucket.

    training thread   take(v) on every rank: its shards, cast to the published dtype ── the next step begins
    rank 0's thread   buckets(v): asks each rank for its part of a bucket, one bucket ahead
    other ranks       answer_until_stopped(): until rank 0 says stop or is gone

A rank that is asked sends its part to rank 0; during a broadcast, to all of its members (`senders`), of which rank 0 is
one. A broadcast that breaks costs the stream nothing: rank 0 asks for that bucket again, and for the later ones alone.

The whole model is on no host: a rank has its own shards and rank 0 has three buckets in addition. A bucket is taken
from the copies or not at all: each answer says whether its rank still holds that version. So `take` never waits for
more than one bucket, and a stream of an older version ends with `Superseded`.

Where deltas are written, `take` also marks which values differ from the version before, which its copies were
(`ShareChanges`): next to its share a rank has its marks, a bit per value. Rank 0 asks each rank once what its changes
cost (`changes`), and fetches the marks of a bucket with the bucket (`marked_buckets`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.weight_sync.broadcast.memory import bucket_memory, spare_memory
from penstock.weight_sync.broadcast.offer import ITEM_BYTES, StreamTensor, stream_order
from penstock.weight_sync.broadcast.rank_wire import Kind, RankWire
from penstock.weight_sync.broadcast.senders import Members, OwnGroup
from penstock.weight_sync.broadcast.shards import Shard, Superseded, VersionChanges
from penstock.weight_sync.broadcast.share_changes import (
    NOT_COMPARED,
    SUMMARY_WIDTH,
    ShareChanges,
    gaps_of,
    mark_bytes,
)
from penstock.weight_sync.broadcast.stream_places import Bucket, MarkedBucket, Places, RankRange, messages, scatter
from penstock.weight_sync.files.delta import Gaps


@dataclass(slots=True)
class _StreamPass:
    """One stream under way."""

    version: int
    bucket_bytes: int
    members: Members
    marked: bool
    memory: list[torch.Tensor] = field(default_factory=list)
    """Two buckets that are filled and used in turn, and a scratch."""

    def bucket(self, begin: int, total: int) -> Bucket:
        *two, scratch = self.memory
        number = begin // self.bucket_bytes
        return Bucket(self.version, begin, two[number % 2][: total - begin], scratch, marked=self.marked)

    def renew_memory(self) -> None:
        """A broadcast that broke may still write to it."""
        self.memory = [bucket_memory(len(each)) for each in self.memory]


class WeightSource:
    """Every rank has one. `take` is called by the training thread, all that streams by threads of rank 0."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        wire: RankWire | None = None,
        wait_s: float = 600.0,
        *,
        finds_changes: bool = False,
    ) -> None:
        """`wire`: between these ranks. `wait_s`: for a rank that is behind.

        `finds_changes`: each version is compared with the one before. Equal on all ranks.
        """
        self.version: int | None = None
        """Version of the copies."""
        self.tensors: tuple[StreamTensor, ...] = ()
        """Tensors in the stream's order."""
        self.wire = wire or RankWire(rank, world, None)
        self.device: torch.device | None = None
        """Device whose memory a broadcast between GPUs moves: the training thread's, when a version was taken."""
        self._rank, self._world, self._wait_s = rank, world, wait_s
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """This rank's shards, in the stream's order."""
        self._buckets: list[torch.Tensor] = []
        """Two that are filled and sent in turn, and one for what comes in parts; empty while they are in use."""
        self.sizes: list[tuple[int, ...]] = []
        """Bytes of each tensor on each rank."""
        self.orders: list[tuple[int, ...]] = []
        """Ranks in the order of their bytes, of each tensor; empty where it is ascending."""
        self._places = Places((), ())
        self._finds_changes = finds_changes
        self._changes = ShareChanges(None, ())
        """This rank's, of `version`."""
        self._changed = threading.Condition()
        """Held while copies are made or read."""
        self._own_group = OwnGroup()

    @classmethod
    def open(cls, rank: int, world: int, timeout: timedelta, *, finds_changes: bool = False) -> WeightSource:
        """Open the source of the ranks of the process group; a collective. `finds_changes` as in the constructor.

        With several, they have a gloo group for this alone, whose messages do not mix with those of steps, and a thread
        each.
        """
        wire = RankWire.open(rank, world, timeout)
        source = cls(rank, world, wire, timeout.total_seconds(), finds_changes=finds_changes)
        wire.start(source.answer_until_stopped)
        return source

    def close(self) -> None:
        """See `RankWire.close`."""
        self.wire.close()

    def take(self, version: int, shards: Iterable[Shard]) -> None:
        """Copy them. Takes one tensor's memory more at most; what nothing else holds is freed on the way."""
        ordered = stream_order(shards)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.device = torch.device("cuda", torch.cuda.current_device())
        with self._changed:
            before, self.version = self.version, None
            if not self._lay_out(ordered) or not self._finds_changes:
                before = None
            self._changes = ShareChanges(None, ())  # the marks before are freed first
            counts = [each[self._rank] // item for each, item in zip(self.sizes, self._places.items, strict=True)]
            self._changes = ShareChanges(before, counts)
            at = 0
            ordered.reverse()
            while ordered:
                at = self._copy(ordered.pop(), len(counts) - len(ordered) - 1, at)
            self.version = version
            self._changed.notify_all()

    def _lay_out(self, ordered: Sequence[Shard]) -> bool:
        """Lay out the copies. Returns True if they lie as those of the version before."""
        tensors = tuple(StreamTensor(shard.name, shard.shape, shard.dtype) for shard in ordered)
        sizes, orders = [shard.rank_bytes for shard in ordered], [shard.order for shard in ordered]
        if (tensors, sizes, orders) == (self.tensors, self.sizes, self.orders):
            return True
        self.tensors, self.sizes, self.orders = tensors, sizes, orders
        self._places = Places(sizes, [ITEM_BYTES[tensor.dtype] for tensor in tensors], orders)
        total = sum(each[self._rank] for each in sizes)
        if len(self._bytes) != total:
            self._bytes = spare_memory(total)
        return False

    def _copy(self, shard: Shard, number: int, at: int) -> int:
        end = at + shard.rank_bytes[self._rank]
        if shard.local.numel() * shard.published.itemsize != end - at:
            raise ValueError(f"tensor {shard.name!r}: rank {self._rank} has {shard.local.numel()} of its values")
        if end > at:
            copy = self._bytes[at:end].view(shard.published)
            self._changes.replace(number, copy, shard.local.detach().reshape(-1))
        return end

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return self._places.total

    def buckets(self, version: int, bucket_bytes: int, members: Members | None = None) -> Generator[torch.Tensor]:
        """The stream, [bytes] uint8 in pieces; each is valid until the next is asked for. On rank 0.

        `members`: to whom it is broadcast. Raises `Superseded`, also at the end, after a bucket whose bytes may have
        changed while it was in use; and `RuntimeError` where a rank is gone.
        """
        yield from (bucket.bytes for bucket in self._filled(version, bucket_bytes, members or Members()))

    def changes(self, version: int) -> VersionChanges | None:
        """Return the changes, on rank 0. None if some rank did not compare `version` with the one that it had before.

        Raises `Superseded`, and `RuntimeError` where a rank is gone.
        """
        rows = self._summaries(version)
        bases = {int(each[0, 0]) for each in rows}
        if len(bases) > 1 or NOT_COMPARED in bases:
            return None
        gaps_by_tensor = [Gaps() for _ in self.tensors]
        for part in self._places.parts:
            gaps = gaps_of(rows[part.rank][1 + part.tensor].tolist())
            gaps_by_tensor[part.tensor] = gaps_by_tensor[part.tensor].followed_by(gaps.shifted(part.value))
        return VersionChanges(bases.pop(), gaps_by_tensor)

    def marked_buckets(self, version: int, bucket_bytes: int) -> Iterator[MarkedBucket]:
        """Yield `buckets` with the marks of their values, of a version that has `changes`."""
        whole_values = max(8, bucket_bytes // 8 * 8)
        for bucket in self._filled(version, whole_values, Members(), marked=True):
            yield MarkedBucket(bucket.bytes, [bucket.marked_part(part) for part in bucket.parts])

    def _filled(self, version: int, bucket_bytes: int, members: Members, *, marked: bool = False) -> Iterator[Bucket]:
        under_way = _StreamPass(version, bucket_bytes, members, marked)
        if self._world == 1:
            yield from self._own_buckets(under_way)
            return
        under_way.memory = self._three_buckets(min(bucket_bytes, self.nbytes))
        begins = iter(range(0, self.nbytes, bucket_bytes))
        with ThreadPoolExecutor(1, thread_name_prefix="next bucket") as ahead:
            pending = [ahead.submit(self._gather, begin, under_way) for begin in itertools.islice(begins, 1)]
            while pending:
                ready = pending.pop().result()
                pending = [ahead.submit(self._gather, begin, under_way) for begin in itertools.islice(begins, 1)]
                yield ready
        self._buckets = under_way.memory

    def _own_buckets(self, under_way: _StreamPass) -> Iterator[Bucket]:
        """Yield the buckets of a lone rank, which fetches nothing."""
        version, members = under_way.version, under_way.members
        for begin in range(0, self.nbytes, under_way.bucket_bytes):
            piece = self._bytes[begin : begin + under_way.bucket_bytes]
            members.begin(0, piece)
            bucket = Bucket(version, begin, piece, piece, marked=under_way.marked)
            if under_way.marked:
                self._add_marks(bucket)
            yield bucket
            members.wait()
            self._check(version)

    def _three_buckets(self, nbytes: int) -> list[torch.Tensor]:
        """Return the buckets of the stream before, if it is at its end; a stream that breaks off gives its own up."""
        with self.wire.lock:
            buckets, self._buckets = self._buckets, []
        if not buckets or len(buckets[0]) != nbytes:
            buckets = [bucket_memory(nbytes) for _ in range(3)]
        return buckets

    def _gather(self, begin: int, under_way: _StreamPass) -> Bucket:
        bucket = under_way.bucket(begin, self.nbytes)
        parts = self._places.within(begin, begin + len(bucket.bytes))
        with self.wire.lock:
            broadcasts = under_way.members.are_there
            if broadcasts and not self._broadcast(bucket, bucket.ranges(parts), under_way.members):
                under_way.renew_memory()
                bucket, broadcasts = under_way.bucket(begin, self.nbytes), False
            if not broadcasts:
                for one in bucket.ranges(parts):
                    self._fetch_range(one, bucket)
        if bucket.marked:
            self._add_marks(bucket)
        return bucket

    def _broadcast(self, bucket: Bucket, ranges: Sequence[RankRange], members: Members) -> bool:
        """Send a bucket: each rank sends its range to all members, in the order of the ranks. Returns True if it
        arrived.
        """
        self.wire.check_open()
        others = sorted({one.rank for one in ranges if one.rank})
        for rank in others:
            self.wire.ask(rank, Kind.SEND, bucket.version, bucket.begin, bucket.begin + len(bucket.bytes))
        self.wire.until_held(others, bucket.version)
        with self._changed:
            self._check(bucket.version)
            for one in ranges:
                members.begin(one.rank, one.memory if one.rank else self._bytes[one.begin : one.end])
            for one in ranges:
                if not one.rank:
                    scatter(self._bytes[one.begin : one.end], one.parts, bucket)
            arrived = members.wait()
        if arrived:
            for one in ranges:
                if one.rank:
                    bucket.place(one)
        return arrived

    def _fetch_range(self, one: RankRange, bucket: Bucket) -> None:
        if one.rank == 0:
            with self._changed:
                self._check(bucket.version)
                scatter(self._bytes[one.begin : one.end], one.parts, bucket)
        else:
            self._fetch(one.rank, Kind.BUCKET, bucket.version, one.begin, one.memory)
            bucket.place(one)

    def _add_marks(self, bucket: Bucket) -> None:
        """Add the marks of a rank's parts: one range of its marks."""
        bucket.parts = self._places.within(bucket.begin, bucket.begin + len(bucket.bytes))
        with self.wire.lock:
            for rank in sorted({part.rank for part in bucket.parts}):
                own = [part for part in bucket.parts if part.rank == rank]
                begin, end = own[0].mark // 8, mark_bytes(own[-1].mark + own[-1].nbytes // own[-1].item_bytes)
                received = torch.empty(end - begin, dtype=torch.uint8)
                self._fetch(rank, Kind.MARKS, bucket.version, begin, received)
                bucket.marks[rank] = (8 * begin, received.numpy())

    def _summaries(self, version: int) -> list[NDArray[np.int64]]:
        """Return the summaries of each rank. All are asked before the first answers: they count at once."""
        summaries = [torch.empty(1 + len(self.tensors), SUMMARY_WIDTH, dtype=torch.int64) for _ in range(self._world)]
        behind: list[Superseded] = []
        with self.wire.lock:
            self.wire.check_open()
            for rank in range(1, self._world):
                self.wire.ask(rank, Kind.SUMMARY, version, 0, summaries[rank].nbytes)
            for rank, received in enumerate(summaries):
                raw = received.view(torch.uint8).reshape(-1)
                try:
                    if rank == 0:
                        self._copy_own(Kind.SUMMARY, version, 0, raw)
                    else:
                        self.wire.receive(rank, version, raw)
                except Superseded as error:  # the answers of the others are still to be taken from the wire
                    behind.append(error)
        if behind:
            raise behind[0]
        return [one.numpy() for one in summaries]

    def _fetch(self, rank: int, kind: Kind, version: int, begin: int, target: torch.Tensor) -> None:
        """`target` [bytes] becomes what the rank has of that kind from `begin` on."""
        if rank == 0:
            self._copy_own(kind, version, begin, target)
            return
        self.wire.check_open()
        self.wire.ask(rank, kind, version, begin, begin + len(target))
        self.wire.receive(rank, version, target)

    def _copy_own(self, kind: Kind, version: int, begin: int, target: torch.Tensor) -> None:
        with self._changed:
            self._check(version)
            target.copy_(self._stored_bytes(kind, begin, begin + len(target)))

    def _check(self, version: int) -> None:
        if self.version != version:
            raise Superseded(f"version {version} is not the newest any more")

    def answer_until_stopped(self) -> None:
        """The work of the other ranks' threads; also ends where rank 0 is gone."""
        try:
            self.wire.answers(self._answer)
        finally:
            self._own_group.leave()

    def _answer(self, kind: Kind, version: int, begin: int, end: int) -> None:
        """Nothing changes the copies until they are sent."""
        if kind == Kind.JOIN:
            self._own_group.join(self.wire.place(version), self.device)
            return
        if kind == Kind.LEAVE:
            self._own_group.leave()
            return
        with self._changed:
            self._changed.wait_for(lambda: self.version is not None and self.version >= version, self._wait_s)
            has_version = self.version == version
            self.wire.say_held(has_version)
            if has_version and kind == Kind.SEND:
                own = [part for part in self._places.within(begin, end) if part.rank == self._rank]
                self._own_group.send([self._bytes[each[0].local : each[-1].local_end] for each in messages(own)])
            elif has_version:
                self.wire.send(self._stored_bytes(kind, begin, end))

    def _stored_bytes(self, kind: Kind, begin: int, end: int) -> torch.Tensor:
        """[end - begin] uint8."""
        if kind == Kind.BUCKET:
            return self._bytes[begin:end]
        if kind == Kind.MARKS:
            return self._changes.marks[begin:end]
        return self._changes.summary().view(torch.uint8).reshape(-1)[begin:end]
