"""Deltas of a trainer of several ranks: the files of one rank to the byte, and no rank has more than its share.

Ranks are threads here, with a gloo group between them, as in `test_source`.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weight_sync.broadcast.test_source import Ranks

from penstock.weight_sync import (
    Manifest,
    NoSpace,
    Shard,
    WeightFiles,
    WeightReader,
    WeightSource,
    checksum,
    read_verified,
)
from penstock.weight_sync.broadcast.shards import Superseded
from penstock.weight_sync.files.delta import words_of

pytestmark = pytest.mark.torch
Tensors = dict[str, Any]
Cut = Callable[[int, int, int], list[int]]
"""How many of a tensor's values each rank has: of its number, its values and the number of ranks."""
GOLDEN = {2: (13_248, "615a1968230dc71d"), 3: (13_224, "97c6081205b08325")}
"""Length and xxh3 of the deltas to `known` versions 2 and 3, as a trainer that gathered them on one rank wrote them."""


def known(version: int) -> Tensors:
    """Places of every encoding."""
    i = torch.arange(6000)
    low = torch.bfloat16
    tensors = {
        "a": (i * 7919 % 1009).float().reshape(60, 100),
        "b": (i % 257).to(low),
        "c": (i * 31 % 511).to(low).reshape(6000, 1),
        "d": torch.arange(3000).to(low),
        "same": torch.ones(50, dtype=low),
        "empty": torch.empty(0, 4, dtype=low),
        "flag": torch.zeros(9, dtype=torch.uint8),
    }
    if version > 1:
        tensors["a"].view(-1)[[0, 254, 600, 5999]] += version
        tensors["b"][::2] += version
        tensors["c"].view(-1)[[700, 1400, 2100, 2800]] += version
        tensors["d"] += 300 * version
        tensors["flag"][8] = version
    return tensors


def evenly(_: int, count: int, world: int) -> list[int]:
    bounds = [count * rank // world for rank in range(world + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def shards_of(tensors: Tensors, world: int, cut: Cut = evenly) -> list[list[Shard]]:
    """By rank."""
    by_rank: list[list[Shard]] = [[] for _ in range(world)]
    for number, (name, tensor) in enumerate(tensors.items()):
        values = cut(number, tensor.numel(), world)
        sizes = tuple(count * tensor.itemsize for count in values)
        for own, part in zip(by_rank, tensor.reshape(-1).split(values), strict=True):
            own.append(Shard(name, tuple(tensor.shape), tensor.dtype, sizes, part))
    return by_rank


class Trainer:
    """Ranks that publish into `folder`."""

    def __init__(self, sources: Sequence[WeightSource], folder: Path, full_every: int) -> None:
        self.sources = sources
        self.files = WeightFiles(folder, "shm", full_every=full_every)
        asyncio.run(self.files.open())

    def take(self, version: int, tensors: Tensors, cut: Cut = evenly) -> None:
        for source, own in zip(self.sources, shards_of(tensors, len(self.sources), cut), strict=True):
            source.take(version, own)

    def publish(self, version: int, tensors: Tensors, cut: Cut = evenly) -> Manifest:
        self.take(version, tensors, cut)
        return self.files.write_from_ranks(version, self.sources[0])


OpenTrainer = Callable[..., Trainer]


@pytest.fixture
def open_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenTrainer]:
    """Opens a trainer of `world` ranks; one may be open at a time."""
    opened: list[Ranks] = []

    def open_one(world: int, full_every: int = 3) -> Trainer:
        ranks = Ranks(world, monkeypatch, finds_changes=True)
        opened.append(ranks)
        return Trainer(ranks.sources, tmp_path / f"ranks{world}", full_every)

    yield open_one
    for ranks in opened:
        ranks.stop()


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[n].shape == right[n].shape and np.array_equal(words_of(left[n]), words_of(right[n])) for n in left
    )


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a tensor takes many, and places come in many pieces."""
    monkeypatch.setattr("penstock.weight_sync.publisher.BUCKET_BYTES", 5000)
    monkeypatch.setattr("penstock.weight_sync.broadcast.share_changes.PIECE_VALUES", 333)
    monkeypatch.setattr("penstock.weight_sync.broadcast.share_changes.CHUNK_VALUES", 400)
    monkeypatch.setattr("penstock.weight_sync.broadcast.share_changes.MOVED_VALUES", 1000)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_deltas_of_ranks_are_the_bytes_of_one_rank(world: int, open_trainer: OpenTrainer) -> None:
    trainer, reader = open_trainer(world), WeightReader()
    manifests = [trainer.publish(version, known(version)) for version in range(1, 5)]
    assert [manifest.base_version for manifest in manifests] == [None, 1, 2, None]
    assert all(manifest.deltas_follow for manifest in manifests)
    for version, (size, xxh3) in GOLDEN.items():
        file = manifests[version - 1].files[-1]
        assert (file.bytes, file.xxh3) == (size, xxh3)
        assert xxhash.xxh3_64_hexdigest(Path(file.place).read_bytes()) == xxh3
    for version, manifest in enumerate(manifests, 1):
        assert equal(reader.read(manifest), known(version))
        assert {entry.name: entry.xxh3 for entry in manifest.tensors} == {
            name: checksum(tensor) for name, tensor in known(version).items()
        }


DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool]


def test_deltas_are_the_same_however_ranks_and_buckets_cut_them(tmp_path: Path, open_trainer: OpenTrainer) -> None:
    """Against a second writer, which has whole versions."""
    three, one = open_trainer(3, full_every=2), Trainer([WeightSource(finds_changes=True)], tmp_path / "one", 2)
    numbers = iter(range(1, 10_000))

    @given(data=st.data())
    @settings(max_examples=15, deadline=None)
    def check(data: st.DataObject) -> None:
        shapes = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 700)), min_size=1, max_size=5))
        rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
        share = data.draw(st.sampled_from([0.0, 0.003, 0.03, 0.3, 1.0]))
        first = {f"t{n}": _bits(rng, dtype, count) for n, (dtype, count) in enumerate(shapes)}
        second = {name: _changed(rng, tensor, share) for name, tensor in first.items()}
        splits = [np.sort(rng.integers(0, count + 1, 2)).tolist() for _, count in shapes]

        def cut(number: int, count: int, world: int) -> list[int]:
            low, high = splits[number]
            return [low, high - low, count - high] if world == 3 else [count]

        with pytest.MonkeyPatch.context() as patch:
            for module, name, values in (
                ("publisher", "BUCKET_BYTES", st.integers(64, 3000)),
                ("broadcast.share_changes", "PIECE_VALUES", st.integers(1, 300)),
                ("broadcast.share_changes", "CHUNK_VALUES", st.integers(1, 90).map(lambda eighth: 8 * eighth)),
            ):
                patch.setattr(f"penstock.weight_sync.{module}.{name}", data.draw(values))
            before, after = next(numbers), next(numbers)
            base, _ = (trainer.publish(before, first, cut) for trainer in (three, one))
            found, of_one = (trainer.publish(after, second, cut) for trainer in (three, one))
        expected = reference(first, second, base.state)
        assert (found.base_version, of_one.base_version) == ((before, before) if expected else (None, None))
        assert Path(found.place).read_bytes() == Path(of_one.place).read_bytes()
        assert expected is None or Path(found.place).read_bytes() == expected
        assert equal(read_verified(found), second)

    check()


def _bits(rng: np.random.Generator, dtype: Any, count: int) -> Any:
    raw = rng.integers(0, 2 if dtype is torch.bool else 256, count * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)


def _changed(rng: np.random.Generator, tensor: Any, share: float) -> Any:
    after = tensor.clone()
    chosen = torch.from_numpy(rng.random(tensor.numel()) < share)
    after[chosen] = _bits(rng, tensor.dtype, int(chosen.sum()))
    return after


def reference(before: Tensors, after: Tensors, base_state: str) -> bytes | None:
    """The file by its description in docs/how/weights.md. None where it is not smaller than the version."""
    table, indices, values = [], b"", b""
    for name in sorted(after, key=lambda name: -after[name].itemsize):
        old, new = words_of(before[name]), words_of(after[name])
        places = np.flatnonzero(old != new).tolist()
        if not places:
            continue
        codes = {"bitmap": sum(1 << place for place in places).to_bytes(-(-new.size // 8), "little")}
        for bits in (8, 16, 32):
            codes[f"gaps{bits}"] = _gaps(places, bits // 8)
        encoding = min(codes, key=lambda code: len(codes[code]))
        index, value = codes[encoding], new[places].tobytes()
        if len(index) + len(value) >= new.nbytes:
            encoding, index, value = "whole", b"", new.tobytes()
        table.append([name, encoding, len(index), len(value), xxhash.xxh3_64_hexdigest(index + value)])
        indices, values = indices + index, values + value
    if len(indices) + len(values) >= sum(tensor.nbytes for tensor in after.values()):
        return None
    changes = json.dumps(table, separators=(",", ":"))
    ends = [len(indices), len(indices) + len(values)]
    header = {
        "__metadata__": {"penstock": "delta/1", "base_state": base_state, "changes": changes},
        "index": {"dtype": "U8", "shape": [len(indices)], "data_offsets": [0, ends[0]]},
        "values": {"dtype": "U8", "shape": [len(values)], "data_offsets": ends},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + indices + values


def _gaps(places: list[int], width: int) -> bytes:
    largest, last, found = (1 << 8 * width) - 1, -1, b""
    for place in places:
        times, rest = divmod(place - last - 1, largest)
        found += largest.to_bytes(width, "little") * times + rest.to_bytes(width, "little")
        last = place
    return found


def forgets(trainer: Trainer) -> None:
    trainer.sources[1].version = None


def reverse(number: int, count: int, world: int) -> list[int]:
    """Each rank has values that another one had."""
    return evenly(number, count, world)[::-1]


def inverted(tensors: Tensors) -> Tensors:
    return {name: (tensor.view(torch.uint8) ^ 1).view(tensor.dtype) for name, tensor in tensors.items()}


WHOLE: dict[str, tuple[Callable[[Trainer], object], int, Tensors, Cut]] = {
    "other tensors": (id, 2, known(2) | {"more": torch.ones(3)}, evenly),
    "another dtype": (id, 2, known(2) | {"same": torch.ones(50)}, evenly),
    "other shares": (id, 2, known(2), reverse),
    "the same number, whose file is gone": (id, 1, known(1), evenly),
    "nothing saved": (id, 2, inverted(known(1)), evenly),
    "a rank without the version before": (forgets, 2, known(2), evenly),
    "a version before that was not written": (lambda trainer: trainer.take(2, known(2)), 3, known(3), evenly),
}


@pytest.mark.parametrize(("before", "version", "tensors", "cut"), WHOLE.values(), ids=WHOLE)
def test_deltas_that_cannot_be_are_whole_versions(
    before: Callable[[Trainer], object], version: int, tensors: Tensors, cut: Cut, open_trainer: OpenTrainer
) -> None:
    """And the next version is a delta to that."""
    trainer = open_trainer(2, full_every=9)
    trainer.publish(1, known(1))
    before(trainer)
    manifest = trainer.publish(version, tensors, cut)
    assert manifest.base_version is None
    assert equal(read_verified(manifest), tensors)
    following = trainer.publish(version + 1, tensors, cut)
    assert following.base_version == version
    assert equal(read_verified(following), tensors)


def test_delta_of_a_rank_that_is_gone_is_no_file(open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before stays, and the next version is whole."""
    trainer = open_trainer(2)
    first = trainer.publish(1, known(1))
    gathered = 0
    gather = WeightSource._add_marks

    def gone_in_the_middle(source: WeightSource, bucket: Any) -> None:
        nonlocal gathered
        gathered += 1
        if gathered > 2:
            raise RuntimeError("connection reset by peer")
        gather(source, bucket)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.weight_sync.publisher.BUCKET_BYTES", 1000)
        patch.setattr(WeightSource, "_add_marks", gone_in_the_middle)
        with pytest.raises(RuntimeError, match="connection reset"):
            trainer.publish(2, known(2))
    assert gathered == 3
    assert [path.name for path in trainer.files.directory.iterdir()] == [first.files[0].name]
    assert equal(read_verified(first), known(1))
    assert trainer.publish(3, known(3)).base_version is None


def test_delta_follows_no_version_that_was_not_written(
    open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under the number of one that was either."""
    trainer = open_trainer(1)
    trainer.publish(1, known(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
        with pytest.raises(NoSpace):
            trainer.publish(1, known(2))
    manifest = trainer.publish(2, known(3))
    assert manifest.base_version is None
    assert equal(read_verified(manifest), known(3))


def test_changes_of_a_rank_that_is_ahead_are_superseded_and_later_ones_are_right(open_trainer: OpenTrainer) -> None:
    """The other ranks' answers are taken, so that the next question has its own."""
    trainer = open_trainer(3)
    trainer.publish(1, known(1))
    trainer.take(2, known(2))
    later = shards_of(known(3), 3)
    trainer.sources[1].take(3, later[1])
    with pytest.raises(Superseded, match="rank 1 does not hold version 2 any more"):
        trainer.sources[0].changes(2)
    for rank in (0, 2):
        trainer.sources[rank].take(3, later[rank])
    found = trainer.sources[0].changes(3)
    assert (found.base, sum(gaps.count > 0 for gaps in found.gaps)) == (2, 5)


def test_delta_takes_rank_0_its_share_its_marks_and_buckets(
    open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both ranks, which are one process here. What torch takes for a moment is counted by processes, below."""
    values, bucket = 8 << 20, 256 << 10
    pieces = 1 << 14
    monkeypatch.setattr("penstock.weight_sync.publisher.BUCKET_BYTES", bucket)
    monkeypatch.setattr("penstock.weight_sync.broadcast.share_changes.PIECE_VALUES", pieces)
    monkeypatch.setattr("penstock.weight_sync.broadcast.share_changes.CHUNK_VALUES", pieces)
    taken: list[int] = []

    def counted(make: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda nbytes: taken.append(nbytes) or make(nbytes)

    source = "penstock.weight_sync.broadcast.source"
    for name in ("spare_memory", "bucket_memory"):
        monkeypatch.setattr(f"{source}.{name}", counted(getattr(importlib.import_module(source), name)))
    trainer = open_trainer(2)
    tensors = {f"t{n}": torch.zeros(values // 4, dtype=torch.bfloat16) for n in range(4)}
    trainer.publish(1, tensors)
    shares = 2 * values
    assert sum(taken) == shares + 3 * bucket
    for tensor in tensors.values():
        tensor[::3] += 1
    tracemalloc.start()
    try:
        manifest = trainer.publish(2, tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (manifest.base_version, manifest.bytes > values // 2) == (1, True), "its changes are more than buckets"
    assert sum(taken) == shares + 3 * bucket, "the same memory as for the version before"
    assert peak < 2 << 20, "places and words of a piece, and the megabyte of the file that is read back"
    marks = sum(source._changes.marks.nbytes for source in trainer.sources)
    assert marks == shares // 16


# ranks that are processes --------------------------------------------------------------------------------------------
def run_ranks(folder: Path, world: int, dies: int = 0) -> tuple[dict[str, Any], list[int]]:
    """What rank 0 has to say, and how each process ended. `dies`: at which of its answers for version 3 the last one
    kills itself."""
    command = [sys.executable, "-m", "tests.weight_sync.delta_ranks", str(folder), str(world), str(dies)]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(world)]
    try:
        said, _ = processes[0].communicate(timeout=300)
        ends = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return json.loads(said), ends


@pytest.mark.deep
def test_rank_processes_write_deltas_in_little_memory(tmp_path: Path) -> None:
    """What torch takes for a moment in any thread, which the test above cannot count."""
    found, ends = run_ranks(tmp_path, 2)
    assert (ends, found["bases"]) == ([0, 0], [None, 1, 2, None])
    assert found["share"] > 40 << 20
    extra = found["peak"] - found["before"]
    print(f"{extra / found['share']:.3f} of rank 0's share")
    assert extra < 24 << 20, "beside its share and its marks: pieces that do not grow with the model"


@pytest.mark.deep
@pytest.mark.parametrize("answer", [1, 2, 5])
def test_rank_that_is_killed_in_a_delta_leaves_no_half_version(answer: int, tmp_path: Path) -> None:
    """At its sums, and within buckets."""
    found, ends = run_ranks(tmp_path, 2, dies=answer)
    assert ends == [0, -signal.SIGKILL]
    assert found["bases"] == [None, 1]
    assert found["error"]
    left = sorted(path.name for path in (tmp_path / "published").iterdir())
    assert left == [Path(place).name for place in found["files"]]
