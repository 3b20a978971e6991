"""Adapters of a small model: what is published, merged and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from penstock.weight_sync import (
    Merger,
    WeightPublisher,
    WeightsRefused,
    read_verified,
)
from penstock.weight_sync.lora.adapter import AdapterConfig, BadAdapter

pytestmark = pytest.mark.torch


def low(**others: Any) -> dict[str, Any]:
    return {
        "base_model.model.a.lora_A.weight": torch.ones(2, 4),
        "base_model.model.a.lora_B.weight": torch.ones(3, 2),
        **others,
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(3, 4)}, folder / "model.safetensors")
    return folder


def test_adapter_files_stay_as_long_as_others(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", keep=2, model=model)
    for version in (1, 2, 3):
        publisher.write_adapter(version, low().items(), {"r": 2, "lora_alpha": 2})
    names = sorted(path.name for path in publisher.directory.iterdir())
    assert names == ["weights-00000002.safetensors", "weights-00000003.safetensors"]


def test_adapter_settings_left_out_are_those_of_peft(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 6})
    held = read_verified(Merger(model, tmp_path / "merged", "float32").merge(manifest))
    assert torch.equal(held["a.weight"], torch.full((3, 4), 2 * 6 / 2.0))


def test_adapter_is_merged_anew_where_its_file_has_gone(model: Path, tmp_path: Path) -> None:
    publisher, merger = (
        WeightPublisher(tmp_path / "published", "shm", model=model),
        Merger(model, tmp_path / "m", "float32"),
    )
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 6})
    Path(merger.merge(manifest).place).unlink()
    assert torch.equal(read_verified(merger.merge(manifest))["a.weight"], torch.full((3, 4), 6.0))


@pytest.mark.parametrize("start", [True, False, None, "gaussian"])
def test_adapter_may_start_in_any_way_that_keeps_its_base(start: object) -> None:
    assert AdapterConfig.from_peft({"r": 8, "lora_alpha": 8, "init_lora_weights": start}).r == 8


def test_adapter_of_no_finite_scale_is_refused() -> None:
    with pytest.raises(BadAdapter, match="lora_alpha or a value of alpha_pattern is no number"):
        AdapterConfig.from_peft({"r": 8, "lora_alpha": float("inf")})


def test_adapter_of_a_model_that_changes_names_version_0(model: Path, tmp_path: Path) -> None:
    publisher, merger = (
        WeightPublisher(tmp_path / "published", "shm", model=model),
        Merger(model, tmp_path / "m", "float32"),
    )
    merger.merge(publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2}))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x7f")
    with pytest.raises(WeightsRefused, match=r"version 0: tensor 'a\.weight' has checksum"):
        merger.merge(publisher.write_adapter(2, low().items(), {"r": 2, "lora_alpha": 2}))


def test_adapter_without_tensors_or_settings_is_refused(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    with pytest.raises(BadAdapter, match="has no tensors"):
        publisher.write_adapter(1, [], {"r": 2, "lora_alpha": 2})
    settings: Any = ["r", "lora_alpha"]
    with pytest.raises(BadAdapter, match="settings are a list"):
        AdapterConfig.from_peft(settings)


def test_adapter_is_merged_into_floats_only(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    publisher = WeightPublisher(tmp_path / "published", "shm", model=tmp_path)
    with pytest.raises(BadAdapter, match=r"'a\.weight' of the model is int8"):
        publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2})


def test_adapter_of_a_model_that_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2})
    (model / "more.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsRefused, match=r"more\.safetensors cannot be read"):
        Merger(model, tmp_path / "merged", "float32").merge(manifest)


def test_publisher_leaves_files_that_others_remove(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody tidies up at the same time."""
    unlink, removed = Path.unlink, list[str]()

    def unlink_second(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path.name.partition("-")[0])
            unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_second)
    (tmp_path / "published").mkdir(mode=0o700)
    (tmp_path / "published" / "left.tmp").touch()
    publisher = WeightPublisher(tmp_path / "published", "shm", 1, model=model)
    merger = Merger(model, tmp_path / "merged", "float32")
    for version in (1, 2):
        merger.merge(publisher.write_adapter(version, low().items(), {"r": 2, "lora_alpha": 2}))
    merger.close()
    assert removed == ["left.tmp", "weights", "merged", "merged"]
