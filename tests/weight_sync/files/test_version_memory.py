"""The memory of one version: how it lies, what of it is mapped, and that nothing is in it that was not announced."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.weight_sync.conftest import altered, next_version, other_checksum, reorder_header, small_tensors

torch = pytest.importorskip("torch")

from tests.weight_sync.files.node_parts import check_is_free, published

from penstock.weight_sync import Manifest, NodeReader, WeightPublisher, WeightsRefused, stream_layout

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets")]


SEED = 7


def test_every_page_is_mapped_before_the_load_and_none_is_copied(tmp_path: Path) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            probe.madvise(22)  # MADV_POPULATE_READ
        except OSError:
            pytest.skip("this kernel maps pages when they are read: it is older than Linux 5.14")
    reader = NodeReader()
    memory = reader.read(published(tmp_path, 4322, seed=SEED))
    memory.map_all()
    size_kb = os.fstat(memory.descriptor).st_size // 1024
    assert mapped_kb(4322, "Rss") >= size_kb > 100
    assert mapped_kb(4322, "Anonymous") == 0
    reader.close()


def mapped_kb(version: int, what: str) -> int:
    """Of `what`, in the mappings of that version's memory."""
    shown = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"memfd:weights-{version} .*\n(?:.*\n)*?{what}: +(\d+) kB", shown)
    return sum(map(int, found))


def test_tensors_are_aligned_views_of_one_mapping(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3), "b": torch.rand(17), "c": torch.arange(5)}
    reader = NodeReader()
    memory = reader.read(WeightPublisher(tmp_path, "shm").write(1, tensors.items()))
    found = {name: memory[name] for name in "abc"}
    places = [tensor.data_ptr() for tensor in found.values()]
    assert [place - places[0] for place in places] == [0, 64, 64 + 128]
    assert [place % 64 for place in places] == [0, 0, 0]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    reader.close()


def test_tensor_that_is_kept_keeps_its_part_of_the_memory_mapped(tmp_path: Path) -> None:
    """Of three of 700 kB: parts are of a MiB."""
    tensors = {name: torch.rand(175_001) for name in "abc"}
    reader = NodeReader()
    memory = reader.read(WeightPublisher(tmp_path, "shm").write(4323, tensors.items()))
    found = [memory[name] for name in "abc"]
    assert all(torch.equal(one, tensor) for one, tensor in zip(found, tensors.values(), strict=True))
    kept = found.pop(1)
    found.clear()
    assert 680 < mapped_kb(4323, "Size") < 700
    assert torch.equal(kept, tensors["b"])
    reader.close()


def layout_of(*sizes: int) -> Any:
    """Of a version that has tensors of so many bytes, in a file's order."""
    plain = [{"name": f"t{n}", "shape": [size], "dtype": "uint8", "xxh3": ""} for n, size in enumerate(sizes)]
    whole = {"version": 1, "transport": "shm", "path": "/x", "bytes": 1, "tensors": plain}
    return stream_layout(Manifest.parse(whole))


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [
        ([256 * KIB] * 6, [MIB, 512 * KIB]),
        ([3 * MIB, KIB, MIB], [3 * MIB, KIB, MIB]),
        ([4 * MIB] * 1024, [16 * MIB] * 256),
    ],
    ids=["small", "large", "many"],
)
def test_memory_is_mapped_in_parts_of_whole_tensors(sizes: list[int], windows: list[int]) -> None:
    """Of a MiB, or of a 256th of the version."""
    layout = layout_of(*sizes)
    assert [size for _, size in layout.windows] == windows
    begins = [begin for begin, _ in layout.windows]
    assert begins == [begins[0] + sum(windows[:number]) for number in range(len(windows))]
    assert begins[0] == layout.places["t0"].offset
    assert layout.bytes == begins[0] + sum(sizes)


def test_a_version_without_a_byte_is_handed_on(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"empty": torch.empty(0, 4)}.items())
    readers = [NodeReader(), NodeReader()]
    for reader in readers:
        assert reader.read(manifest)["empty"].shape == (0, 4)
    assert [reader.verified for reader in readers] == [1, 0]
    for reader in readers:
        reader.close()


def test_a_machine_without_memory_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    manifest = published(tmp_path, seed=SEED)
    with pytest.raises(WeightsRefused, match=r"version 1: no copy of 0 MiB can be kept in memory: .*Cannot allocate"):
        NodeReader().read(manifest)
    check_is_free(manifest.state)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plain: plain["tensors"].append(plain["tensors"][0] | {"name": "more"}), "'more' is missing"),
        (lambda plain: plain["tensors"].pop(), "'last' is not in the manifest"),
        (lambda plain: plain["tensors"][0].update(shape=[300, 200]), "'embed' has shape"),
        (lambda plain: plain["tensors"][0].update(dtype="float16"), "'embed' is bfloat16"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_a_version_that_differs_is_refused_by_tensor(tmp_path: Path, change: Any, problem: str) -> None:
    manifest = published(tmp_path, seed=SEED)
    with pytest.raises(WeightsRefused, match=problem):
        NodeReader().read(altered(manifest, change))
    check_is_free(manifest.state)


def test_a_version_of_other_bytes_is_refused_by_its_file(tmp_path: Path) -> None:
    """They mean the same, so that no tensor is to blame."""
    manifest = published(tmp_path, seed=SEED)
    reorder_header(Path(manifest.place))
    with pytest.raises(WeightsRefused, match=r"weights-00000001\.safetensors has checksum"):
        NodeReader().read(manifest)


def test_a_delta_that_leads_elsewhere_is_refused_by_tensor(tmp_path: Path) -> None:
    publisher, reader = WeightPublisher(tmp_path, "shm", full_every=8), NodeReader()
    reader.read(publisher.write(1, small_tensors(SEED).items()))
    manifest = publisher.write(2, next_version(small_tensors(SEED), 2).items())
    with pytest.raises(WeightsRefused, match="'last' has checksum"):
        reader.read(altered(manifest, other_checksum))
    reader.close()


def test_a_refused_version_leaves_nothing_open(tmp_path: Path) -> None:
    manifest = altered(published(tmp_path, 4324, seed=SEED), other_checksum)
    before = len(os.listdir("/proc/self/fd"))
    reader = NodeReader()
    for _ in range(2):
        with pytest.raises(WeightsRefused, match="'embed'") as caught:
            reader.read(manifest)
        check_is_free(manifest.state)
        assert caught.value.args
    assert len(os.listdir("/proc/self/fd")) == before
