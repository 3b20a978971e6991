"""Weights through a file: whole versions or none, every byte checked, refusals that name the tensor."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from tests.weight_sync.conftest import altered

from penstock.weight_sync import (
    NoSpace,
    WeightPublisher,
    WeightsRefused,
    read_verified,
)

pytestmark = pytest.mark.torch


def tensors(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    return {
        "odd": torch.randn(3, 5).to(torch.bfloat16),
        "embed": torch.randn(7, 4),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor([1, 2, 3]),
    }


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_round_trip_is_bit_exact_and_ordinary_safetensors(tmp_path: Path, transport: str) -> None:
    sent = tensors()
    manifest = WeightPublisher(tmp_path, transport).write(3, sent.items())
    received = read_verified(manifest)
    plain = safetensors_torch.load_file(manifest.place)
    assert manifest.version == 3
    assert manifest.transport == transport
    assert [entry.name for entry in manifest.tensors] == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)
        assert torch.equal(plain[name], tensor)
        assert received[name].dtype == tensor.dtype


def test_only_the_newest_versions_stay_and_leftovers_go(tmp_path: Path) -> None:
    """Two, as docs/weight_sync.md has it."""
    (tmp_path / "weights-00000009.safetensors.77.tmp").write_bytes(b"half")
    publisher = WeightPublisher(tmp_path, "shm")
    for version in (1, 2, 3, 10):
        publisher.write(version, tensors(version).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "weights-00000003.safetensors",
        "weights-00000010.safetensors",
    ]
    publisher.close()
    assert not tmp_path.exists()


def test_versions_of_a_life_that_was_taken_back_do_not_push_the_present_one_out(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", keep=2)
    for version in (5, 6, 4):
        manifest = publisher.write(version, tensors(version).items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000004.safetensors"]
    assert read_verified(manifest).keys() == tensors(4).keys()
    publisher.write(5, tensors(5).items())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_changed_byte_is_refused_by_tensor_name(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, tensors().items())
    path = Path(manifest.place)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsRefused, match="'count' has checksum"):
        read_verified(manifest)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shape", [4, 7], "'embed' has shape"),
        ("dtype", "float16", "'embed' is float32"),
        ("xxh3", "0", "'embed' has ch"),
    ],
)
def test_an_entry_that_differs_is_refused_by_tensor_name(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, tensors().items())
    with pytest.raises(WeightsRefused, match=message):
        read_verified(altered(manifest, lambda plain: plain["tensors"][1].update({field: value})))


def test_missing_extra_truncated_and_gone_are_refused(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, tensors().items())
    more = {"name": "lm_head", "shape": [1], "dtype": "float32", "xxh3": "0"}
    with pytest.raises(WeightsRefused, match="'lm_head' is missing"):
        read_verified(altered(manifest, lambda plain: plain["tensors"].append(more)))
    with pytest.raises(WeightsRefused, match="'count' is not in the manifest"):
        read_verified(altered(manifest, lambda plain: plain["tensors"].pop()))
    with pytest.raises(WeightsRefused, match="no field 'path'"):
        altered(manifest, lambda plain: plain.pop("path"))
    path = Path(manifest.place)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WeightsRefused, match="bytes, the manifest says"):
        read_verified(manifest)
    path.unlink()
    with pytest.raises(WeightsRefused, match="No such file"):
        read_verified(manifest)


def test_no_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = WeightPublisher(tmp_path, "shm")
    usage = namedtuple("usage", "total used free")(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(NoSpace, match="0 MiB free"):
        publisher.write(1, tensors().items())
    assert list(tmp_path.iterdir()) == []
