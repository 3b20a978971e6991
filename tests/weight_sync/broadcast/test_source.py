"""The trainer's ranks of one version: their copies become one stream, whatever each of them holds and does meanwhile.

Ranks are threads here, with a gloo group between them; tests/trainer has ranks that are processes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.until import until_in_threads

from penstock.weight_sync import Shard, StreamTensor, WeightSource, checksum, stream_version
from penstock.weight_sync.broadcast.offer import StreamDigests
from penstock.weight_sync.broadcast.rank_wire import RankWire
from penstock.weight_sync.broadcast.shards import Superseded

pytestmark = pytest.mark.torch
SILENCE = timedelta(seconds=20)


class Wire:
    """`torch.distributed` for ranks of one process: each passes its own group."""

    def __init__(self, world: int) -> None:
        self._store = dist.HashStore()
        self.groups: list[Any] = [None] * world
        joining = [threading.Thread(target=self._join, args=[rank, world]) for rank in range(world)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        self.sent: list[tuple[int, list[int]]] = []
        """Target and words of each request of rank 0."""
        self._opened = iter(self.groups)

    def _join(self, rank: int, world: int) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SILENCE
        self.groups[rank] = dist.ProcessGroupGloo(self._store, rank, world, options)

    def new_group(self, **_settings: object) -> Any:
        return next(self._opened)

    def send(self, tensor: Any, dst: int, group: Any) -> None:
        if group is self.groups[0]:
            self.sent.append((dst, tensor.tolist()))
        group.send([tensor], dst, 0).wait()

    def recv(self, tensor: Any, src: int, group: Any) -> None:
        group.recv([tensor], src, 0).wait()


class Ranks:
    """`sources` of a trainer's ranks; all but the first answer until `stop`."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch, *, finds_changes: bool = False) -> None:
        self.wire = Wire(world)
        monkeypatch.setattr("penstock.weight_sync.broadcast.rank_wire.dist", self.wire)
        self.sources = [
            WeightSource(rank, world, RankWire(rank, world, group), finds_changes=finds_changes)
            for rank, group in enumerate(self.wire.groups)
        ]
        self.answering = [
            threading.Thread(target=source.answer_until_stopped, daemon=True) for source in self.sources[1:]
        ]
        for thread in self.answering:
            thread.start()

    def take(self, version: int, shards: list[list[Shard]]) -> None:
        for source, own in zip(self.sources, shards, strict=True):
            source.take(version, own)

    def stop(self) -> None:
        self.sources[0].wire.stop_others()
        for thread in self.answering:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Three."""
    opened = Ranks(3, monkeypatch)
    yield opened
    opened.stop()


def sharded(version: int, sizes: list[tuple[int, ...]], order: tuple[int, ...] = ()) -> tuple[list[list[Shard]], Any]:
    """Returns each rank's shards and the stream. `order`: the ranks in the order of their bytes in a tensor."""
    shards: list[list[Shard]] = [[] for _ in sizes[0]]
    stream = []
    for number, each in enumerate(sizes):
        values = torch.arange(sum(each), dtype=torch.int32) + 1000 * number + 100_000 * version
        stream.append(values)
        rank_bytes = tuple(4 * size for size in each)
        in_order = order or range(len(each))
        for rank, part in zip(in_order, values.split([each[rank] for rank in in_order]), strict=True):
            shards[rank].append(Shard(f"t{number}", (sum(each),), torch.int32, rank_bytes, part, order))
    return shards, torch.cat(stream).view(torch.uint8)


def read(source: WeightSource, version: int, bucket_bytes: int) -> Any:
    return torch.cat([bucket.clone() for bucket in source.buckets(version, bucket_bytes)])


def test_source_streams_what_the_ranks_hold(ranks: Ranks) -> None:
    numbers = itertools.count(1)

    @given(
        sizes=st.lists(st.tuples(*[st.integers(0, 7)] * 3), min_size=1, max_size=6).filter(lambda s: any(map(any, s))),
        bucket_bytes=st.integers(1, 70),
    )
    @settings(max_examples=25)
    def check(sizes: list[tuple[int, ...]], bucket_bytes: int) -> None:
        version = next(numbers)
        shards, stream = sharded(version, sizes)
        ranks.take(version, shards)
        assert ranks.sources[0].nbytes == len(stream)
        assert torch.equal(read(ranks.sources[0], version, bucket_bytes), stream)

    check()


def test_source_waits_for_a_rank_that_is_behind(ranks: Ranks) -> None:
    first, second = sharded(1, [(3, 2, 1)]), sharded(2, [(3, 2, 1)])
    ranks.sources[0].take(1, first[0][0])
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(read(ranks.sources[0], 1, 8)))
    reading.start()
    until_in_threads(lambda: bool(ranks.wire.sent))
    time.sleep(0.1)  # for it to wait by now; where it does not yet, the test shows less
    for source, own in zip(ranks.sources[1:], first[0][1:], strict=True):
        source.take(1, own)
    reading.join(60)
    assert torch.equal(found[0], first[1])
    ranks.take(2, second[0])
    assert torch.equal(read(ranks.sources[0], 2, 100), second[1])


def test_source_of_a_rank_that_is_ahead_is_superseded(ranks: Ranks) -> None:
    ranks.take(1, sharded(1, [(0, 4, 4)])[0])
    ranks.sources[2].take(2, sharded(2, [(0, 4, 4)])[0][2])
    with pytest.raises(Superseded, match="rank 2 does not hold version 1 any more"):
        read(ranks.sources[0], 1, 100)


def test_source_that_goes_on_to_the_next_version_ends_the_stream(ranks: Ranks) -> None:
    shards, _ = sharded(1, [(4, 4, 4)] * 3)
    ranks.take(1, shards)
    buckets = ranks.sources[0].buckets(1, 16)
    next(buckets)
    ranks.sources[0].take(2, sharded(2, [(4, 4, 4)] * 3)[0][0])
    with pytest.raises(Superseded, match="version 1 is not the newest any more"):
        list(buckets)


def test_source_uses_its_buckets_again_after_a_whole_stream(ranks: Ranks) -> None:
    """One that broke off may still be in use."""
    shards, stream = sharded(1, [(40, 40, 40)])
    ranks.take(1, shards)
    source = ranks.sources[0]
    kept = list(source.buckets(1, 160))
    places = [bucket.data_ptr() for bucket in kept]
    assert (places[0], len(set(places))) == (places[2], 2)
    assert [bucket.data_ptr() for bucket in source.buckets(1, 160)] == places
    assert torch.equal(read(source, 1, 100), stream), "buckets of another size"
    kept = list(source.buckets(1, 160))
    broken = source.buckets(1, 160)
    first = next(broken)
    assert first.data_ptr() == kept[0].data_ptr()
    assert next(source.buckets(1, 160)).data_ptr() not in {bucket.data_ptr() for bucket in kept}
    assert torch.equal(first, stream[:160])
    broken.close()


def test_source_that_stops_asks_nobody(ranks: Ranks) -> None:
    ranks.take(1, sharded(1, [(0, 4, 4)])[0])
    ranks.sources[0].close()
    with pytest.raises(Superseded, match="the trainer stops"):
        read(ranks.sources[0], 1, 100)
    assert ranks.wire.sent == []


def test_source_threads_answer_and_end_with_their_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(3)
    monkeypatch.setattr("penstock.weight_sync.broadcast.rank_wire.dist", wire)
    monkeypatch.setattr("penstock.weight_sync.broadcast.rank_wire.PING_S", 0.01)
    monkeypatch.setattr("penstock.weight_sync.broadcast.rank_wire.CLOSE_S", 20.0)
    sources = [WeightSource.open(rank, 3, SILENCE) for rank in range(3)]
    shards, stream = sharded(1, [(5, 5, 5)] * 2)
    for source, own in zip(sources, shards, strict=True):
        source.take(1, own)
    until_in_threads(lambda: {rank for rank, words in wire.sent if words == [0, 0, 0, 0]} == {1, 2})
    assert torch.equal(read(sources[0], 1, 16), stream)
    assert {rank for rank, words in wire.sent if words[:2] == [1, 1]} == {1, 2}
    for source in sources:
        source.close()
    assert [rank for rank, words in wire.sent if words == [2, 0, 0, 0]] == [1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name == "weights of this rank"]


def test_source_of_a_rank_says_that_the_first_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(globals(), "SILENCE", timedelta(seconds=5))
    ranks = Ranks(2, monkeypatch)
    ranks.wire.groups[0].abort()
    ranks.answering[0].join(60)
    assert not ranks.answering[0].is_alive()
    assert "rank 0 of the trainer asks for no more weights: " in caplog.text


def test_source_of_one_rank_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weight_sync.broadcast.rank_wire.dist", None)
    source = WeightSource.open(0, 1, SILENCE)
    shards, stream = sharded(1, [(5,), (0,), (3,)])
    source.take(1, shards[0])
    assert [len(bucket) for bucket in source.buckets(1, 12)] == [12, 12, 8]
    assert torch.equal(read(source, 1, 12), stream)
    source.close()


def test_source_refuses_a_shard_of_another_size() -> None:
    """And holds no version then: its copies are of two."""
    source = WeightSource()
    source.take(1, sharded(1, [(5,)])[0][0])
    shard = Shard("w", (4,), torch.float32, (16,), torch.zeros(3))
    with pytest.raises(ValueError, match="tensor 'w': rank 0 has 3 of its values"):
        source.take(2, [shard])
    assert source.version is None
    odd = Shard("w", (1,), torch.complex64, (8,), torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"complex64 cannot be broadcast; set rollout\.weight_transport=http"):
        source.take(2, [odd])


# the stream ----------------------------------------------------------------------------------------------------------
DTYPES = ["float64", "int64", "float32", "int32", "bfloat16", "float16", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stream_tensor_has_the_bytes_of_its_dtype(dtype: str) -> None:
    assert StreamTensor("w", (3, 5), dtype).nbytes == 15 * getattr(torch, dtype).itemsize


EMPTY, A, B = StreamTensor("empty", (0, 2), "int8"), StreamTensor("a", (4,), "int8"), StreamTensor("b", (3,), "int8")


@pytest.mark.parametrize("tensors", [[], [EMPTY], [EMPTY, A, EMPTY, B, EMPTY]], ids=len)
@pytest.mark.parametrize("piece", [1, 3, 7])
def test_stream_digests_are_the_checksums_of_its_tensors(tensors: list[StreamTensor], piece: int) -> None:
    values = [torch.arange(tensor.nbytes, dtype=torch.int8) + 9 for tensor in tensors]
    stream = b"".join(value.numpy().tobytes() for value in values)
    digests = StreamDigests(tensors)
    for at in range(0, len(stream), piece):
        digests.update(memoryview(stream)[at : at + piece])
    found = digests.entries()
    assert [(entry.name, entry.shape, entry.dtype) for entry in found] == [(t.name, t.shape, t.dtype) for t in tensors]
    assert [entry.xxh3 for entry in found] == [checksum(value) for value in values]
    with pytest.raises(ValueError, match="the stream is longer than its tensors"):
        digests.update(memoryview(b"x"))


def test_stream_digests_name_the_tensor_that_is_not_whole() -> None:
    digests = StreamDigests([A, B])
    digests.update(memoryview(bytes(5)))
    with pytest.raises(ValueError, match="the stream ends within tensor 'b'"):
        digests.entries()


def test_stream_that_is_written_for_nobody_is_a_file(tmp_path: Path) -> None:
    source = WeightSource()
    source.take(1, sharded(1, [(5,), (3,)])[0][0])
    path = tmp_path / "weights"
    found = stream_version(source, 1, path, write=False, bucket_bytes=8)
    assert (found.done, path.exists(), found.written.path) == (0, False, path)
    assert stream_version(source, 1, path, write=True, bucket_bytes=8) == found
    assert path.stat().st_size == found.written.bytes
