"""The publisher: whole versions or none, in files that any reader of safetensors can read."""

from __future__ import annotations

import io
import shutil
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.weight_sync.conftest import small_tensors

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


from penstock.weight_sync import (
    NoSpace,
    WeightPublisher,
    read_verified,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_version_is_an_ordinary_safetensors_file(tmp_path: Path, transport: str) -> None:
    sent = small_tensors() | {"low": torch.randn(3, 5).to(torch.bfloat16)}
    manifest = WeightPublisher(tmp_path, transport).write(3, sent.items())
    received, plain = read_verified(manifest), safetensors_torch.load_file(manifest.place)
    assert (manifest.version, manifest.transport) == (3, transport)
    assert [entry.name for entry in manifest.tensors] == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)
        assert torch.equal(plain[name], tensor)
        assert received[name].dtype == tensor.dtype


def test_only_the_newest_versions_stay_and_leftovers_go(tmp_path: Path) -> None:
    """Two, as docs/how/weights.md has it."""
    (tmp_path / "weights-00000009.safetensors.77.tmp").write_bytes(b"half")
    publisher = WeightPublisher(tmp_path, "shm")
    for version in (1, 2, 3, 10):
        publisher.write(version, small_tensors(version).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "weights-00000003.safetensors",
        "weights-00000010.safetensors",
    ]
    publisher.close()
    assert not tmp_path.exists()


def test_versions_of_a_life_that_was_taken_back_do_not_push_the_present_one_out(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", keep=2)
    for version in (5, 6, 4):
        manifest = publisher.write(version, small_tensors(version).items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000004.safetensors"]
    assert read_verified(manifest).keys() == small_tensors(4).keys()
    publisher.write(5, small_tensors(5).items())
    assert len(list(tmp_path.iterdir())) == 2


TWICE = {"twice": ["a", "a"], "as metadata": ["__metadata__"]}


@pytest.mark.parametrize("names", TWICE.values(), ids=TWICE)
def test_publisher_refuses_a_name_that_is_taken(tmp_path: Path, names: list[str]) -> None:
    publisher = WeightPublisher(tmp_path, "shm")
    with pytest.raises(ValueError, match=f"'{names[-1]}' is given twice"):
        publisher.write(1, [(name, torch.rand(2)) for name in names])
    assert list(tmp_path.iterdir()) == []


def test_publisher_refuses_what_it_is_not_made_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http transport needs the URL"):
        WeightPublisher(tmp_path, "http")
    with pytest.raises(ValueError, match="model folder of version 0"):
        WeightPublisher(tmp_path, "shm").write_adapter(1, [], {"r": 1, "lora_alpha": 1})


@pytest.mark.parametrize("keep", [0, 1])
def test_publisher_keeps_one_version_at_least(tmp_path: Path, keep: int) -> None:
    publisher = WeightPublisher(tmp_path, "shm", keep)
    for version in (1, 2):
        publisher.write(version, small_tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000002.safetensors"]


def test_publisher_fills_the_room_but_for_16_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = WeightPublisher(tmp_path, "shm")
    needed = publisher.write(1, small_tensors().items()).bytes + (16 << 20)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(NoSpace, match=f"{free >> 20} MiB free.*needs 16 MiB"):
            publisher.write(1 if fits else 2, small_tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000001.safetensors"]


def test_publisher_frees_each_tensor_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and file together never take the memory of two."""
    storages: list[Any] = []
    freed: list[list[bool]] = []

    def tensors() -> Iterator[tuple[str, Any]]:
        for name in "abc":
            tensor = torch.rand(9)
            storages.append(weakref.ref(tensor.untyped_storage()))
            yield name, tensor
            del tensor

    class Watched(io.BytesIO):
        def write(self, piece: Any) -> int:
            freed.append([one() is None for one in storages])
            return super().write(piece)

    monkeypatch.setattr("penstock.weight_sync.files.file_format.new_file", lambda *_, **__: nullcontext(Watched()))
    WeightPublisher(tmp_path, "shm").write(1, tensors())
    freed.append([one() is None for one in storages])
    assert freed == [[False] * 3, *([number < written for number in range(3)] for written in range(4))]


def test_publisher_calls_no_other_failure_a_lack_of_room(tmp_path: Path) -> None:
    (tmp_path / "weights-00000001.safetensors").mkdir()
    with pytest.raises(OSError, match="weights-00000001") as caught:
        WeightPublisher(tmp_path, "shm").write(1, small_tensors().items())
    assert not isinstance(caught.value, NoSpace)
