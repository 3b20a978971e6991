"""A version's bytes in the trainer: each rank keeps a copy of its own shards, rank 0 fetches them bucket by bucket.

    training thread   take(v) on every rank: its shards, cast to the published dtype ── the next step begins
    rank 0's thread   buckets(v): asks each rank for its part of a bucket, one bucket ahead
    other ranks       serve(): answer, until rank 0 says stop or is gone

The whole model is on no host: a rank has its own shards and rank 0 has three buckets beside them. A bucket is taken
from the copies or not at all: each answer says whether its rank still holds that version. So `take` never waits for
more than one bucket, and a stream of an older version ends with `Superseded`.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.weight_sync.broadcast.memory import bucket_memory, spare_memory
from penstock.weight_sync.broadcast.offer import StreamTensor, stream_order
from penstock.weight_sync.file_format import dtype_name

logger = logging.getLogger(__name__)
PING_S = 5.0
"""Rank 0 says that often that it is there: the others wait for it with a deadline."""
CLOSE_S = 60.0
_PING, _BUCKET, _STOP = range(3)


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


class WeightSource:
    """Every rank has one. `take` is called by the training thread, `buckets` by threads of rank 0."""

    def __init__(self, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None, wait_s: float = 600.0):
        """`group`: gloo, of these ranks, used for nothing else. `wait_s`: for a rank that is behind."""
        self.version: int | None = None
        """What the copies are of."""
        self.tensors: tuple[StreamTensor, ...] = ()
        """In the stream's order."""
        self._rank, self._world, self._group, self._wait_s = rank, world, group, wait_s
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """This rank's shards, in the stream's order."""
        self._buckets: list[torch.Tensor] = []
        """Two that are filled and sent in turn, and one for what comes in parts; empty while they are in use."""
        self._places = _Places(())
        self._changed = threading.Condition()
        """Held while copies are made or read."""
        self._wire = threading.Lock()
        """Held over each question and its answer."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, rank: int, world: int, timeout: timedelta) -> WeightSource:
        """Of the ranks of the process group; a collective.

        With several, they have a gloo group for this alone, whose messages do not mix with those of steps, and a thread
        each: rank 0's keeps the others waiting, theirs answer it.
        """
        group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        source = cls(rank, world, group, timeout.total_seconds())
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
        sizes = [shard.rank_bytes for shard in ordered]
        with self._changed:
            self.version = None
            self.tensors = tuple(StreamTensor(shard.name, shard.shape, shard.dtype) for shard in ordered)
            total = sum(each[self._rank] for each in sizes)
            if len(self._bytes) != total:
                self._bytes = spare_memory(total)
            self._places = _Places(sizes)
            at = 0
            ordered.reverse()
            while ordered:
                at = self._copy(ordered.pop(), at)
            self.version = version
            self._changed.notify_all()

    def _copy(self, shard: Shard, at: int) -> int:
        end = at + shard.rank_bytes[self._rank]
        if shard.local.numel() * shard.published.itemsize != end - at:
            raise ValueError(f"tensor {shard.name!r}: rank {self._rank} has {shard.local.numel()} of its values")
        if end > at:
            self._bytes[at:end].view(shard.published).copy_(shard.local.detach().reshape(-1))
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
        total = self.nbytes
        begins = range(0, total, bucket_bytes)
        if self._world == 1:
            for begin in begins:
                yield self._bytes[begin : begin + bucket_bytes]
                self._check(version)
            return
        three = self._three_buckets(min(bucket_bytes, total))
        *two, scratch = three
        wanted = [
            _Bucket(version, begin, two[number % 2][: total - begin], scratch) for number, begin in enumerate(begins)
        ]
        with ThreadPoolExecutor(1, thread_name_prefix="next bucket") as ahead:
            pending: Future[torch.Tensor] | None = None
            for number, bucket in enumerate(wanted):
                ready = (pending or ahead.submit(self._gather, bucket)).result()
                following = wanted[number + 1 : number + 2]
                pending = ahead.submit(self._gather, *following) if following else None
                yield ready
        self._buckets = three

    def _three_buckets(self, nbytes: int) -> list[torch.Tensor]:
        """Those of the stream before, if it is at its end; a stream that breaks off gives its own up."""
        with self._wire:
            kept, self._buckets = self._buckets, []
        if not kept or len(kept[0]) != nbytes:
            kept = [bucket_memory(nbytes) for _ in range(3)]
        return kept

    def _gather(self, bucket: _Bucket) -> torch.Tensor:
        with self._wire:
            parts = self._places.within(bucket.begin, bucket.begin + len(bucket.bytes))
            for rank in sorted({part.rank for part in parts}):
                own = [part for part in parts if part.rank == rank]
                if rank == 0:
                    self._read(own, bucket)
                else:
                    self._ask(rank, own, bucket)
        return bucket.bytes

    def _read(self, parts: list[_Part], bucket: _Bucket) -> None:
        with self._changed:
            self._check(bucket.version)
            _scatter(self._bytes[parts[0].local : parts[-1].local_end], parts, bucket)

    def _ask(self, rank: int, parts: list[_Part], bucket: _Bucket) -> None:
        """A rank's parts of one bucket are one range of its copies."""
        if self._closed.is_set():
            raise Superseded("the trainer stops")
        first, last = parts[0].local, parts[-1].local_end
        self._tell(rank, _BUCKET, bucket.version, first, last)
        held = torch.zeros(1, dtype=torch.int64)
        dist.recv(held, src=rank, group=self._group)
        if not held.item():
            raise Superseded(f"rank {rank} does not hold version {bucket.version} any more")
        if len(parts) == 1:
            at = parts[0].stream - bucket.begin
            dist.recv(bucket.bytes[at : at + last - first], src=rank, group=self._group)
            return
        received = bucket.scratch[: last - first]
        dist.recv(received, src=rank, group=self._group)
        _scatter(received, parts, bucket)

    def _check(self, version: int) -> None:
        if self.version != version:
            raise Superseded(f"version {version} is not the newest any more")

    def _tell(self, rank: int, *words: int) -> None:
        dist.send(torch.tensor([*words, *[0] * (4 - len(words))], dtype=torch.int64), dst=rank, group=self._group)

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            if self._wire.acquire(blocking=False):
                try:
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
                if kind == _BUCKET:
                    self._answer(version, begin, end)
        except RuntimeError as error:
            if not self._closed.is_set():
                logger.error("rank 0 of the trainer asks for no more weights: %s", error)

    def _answer(self, version: int, begin: int, end: int) -> None:
        """Nothing changes the copies until they are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self.version is not None and self.version >= version, self._wait_s)
            held = self.version == version
            dist.send(torch.tensor([int(held)], dtype=torch.int64), dst=0, group=self._group)
            if held:
                dist.send(self._bytes[begin:end], dst=0, group=self._group)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One to be filled."""

    version: int
    begin: int
    """Where it begins in the stream."""
    bytes: torch.Tensor
    """[bytes] uint8, as long as the bucket."""
    scratch: torch.Tensor
    """As long: what comes from a rank in several parts lies here first."""


class _Part(NamedTuple):
    """Consecutive bytes of the stream that are on one rank."""

    rank: int
    stream: int
    """Where they begin in the stream."""
    local: int
    """Where they begin in the rank's copies."""
    nbytes: int

    @property
    def local_end(self) -> int:
        return self.local + self.nbytes


class _Places:
    """Which rank has which bytes of the stream."""

    def __init__(self, sizes: Iterable[tuple[int, ...]]) -> None:
        """`sizes`: of each tensor in the stream's order, the bytes on each rank."""
        self._parts: list[_Part] = []
        self.total, local = 0, dict[int, int]()
        for each in sizes:
            for rank, nbytes in enumerate(each):
                if nbytes:
                    self._parts.append(_Part(rank, self.total, local.get(rank, 0), nbytes))
                    self.total += nbytes
                    local[rank] = local.get(rank, 0) + nbytes
        self._begins = [part.stream for part in self._parts]

    def within(self, begin: int, end: int) -> list[_Part]:
        """The parts of the bytes from `begin` to `end`, cut to them."""
        found = []
        for part in self._parts[max(0, bisect.bisect_right(self._begins, begin) - 1) :]:
            if part.stream >= end:
                break
            cut = max(begin - part.stream, 0)
            nbytes = min(end, part.stream + part.nbytes) - part.stream - cut
            found.append(_Part(part.rank, part.stream + cut, part.local + cut, nbytes))
        return found


def _scatter(source: torch.Tensor, parts: list[_Part], bucket: _Bucket) -> None:
    """`source` holds one rank's bytes from the first part's place on."""
    for part in parts:
        at = part.stream - bucket.begin
        bucket.bytes[at : at + part.nbytes] = source[part.local - parts[0].local :][: part.nbytes]
