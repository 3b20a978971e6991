"""Adapters from publisher to merged file, with real peft models and small ones; `test_adapters` has real servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.rollout_server.peft_policy import PeftPolicy

from penstock.weight_sync import (
    Manifest,
    Merger,
    WeightPublisher,
    WeightReader,
    WeightsRefused,
    WeightsUnreachable,
    read_verified,
)
from penstock.weight_sync.lora.adapter import AdapterConfig, BadAdapter

pytestmark = pytest.mark.torch
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def publisher(tiny_model: str, tmp_path: Path) -> WeightPublisher:
    return WeightPublisher(tmp_path / "published", "shm", keep=4, model=Path(tiny_model))


@pytest.fixture
def merger(tiny_model: str, tmp_path: Path) -> Merger:
    return Merger(Path(tiny_model), tmp_path / "merged", "float32")


def publish(publisher: WeightPublisher, version: int, policy: PeftPolicy) -> dict[str, Any]:
    return publisher.write_adapter(version, policy.tensors().items(), policy.config())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_rslora": True, "r": 4},
    {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 3}, "alpha_pattern": {"down_proj": 5}},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "lora_dropout": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "rslora", "patterns", "one-layer"])
def test_the_merged_version_is_what_peft_merges(
    tiny_model: str, publisher: WeightPublisher, merger: Merger, settings: dict[str, Any]
) -> None:
    policy = PeftPolicy(tiny_model, **settings)
    policy.train(3, seed=0)
    manifest = Manifest.parse(json.loads(json.dumps(publish(publisher, 1, policy).as_dict())))
    held = read_verified(merger.merge(manifest))
    expected, base = policy.merged(), load_file(Path(tiny_model) / "model.safetensors")
    assert held.keys() == base.keys()
    changed = {name for name in held if not torch.equal(held[name], base[name])}
    assert changed == {
        name.removeprefix("base_model.model.").replace("lora_A.", "") for name in policy.tensors() if "lora_A" in name
    }
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)
        assert name in changed or torch.equal(tensor, base[name])


def test_each_adapter_replaces_the_one_before(tiny_model: str, publisher: WeightPublisher, merger: Merger) -> None:
    policy = PeftPolicy(tiny_model)
    for version in (1, 2, 3):
        policy.train(2, seed=version)
        merged = merger.merge(publish(publisher, version, policy))
        torch.testing.assert_close(
            read_verified(merged)[f"{Q}.weight"], policy.merged()[f"{Q}.weight"], rtol=0, atol=2e-6
        )
        assert [path.name for path in merger.directory.iterdir()] == [f"merged-{version:08d}.safetensors"]
    written_ns = Path(merged.place).stat().st_mtime_ns
    assert merger.merge(publish(publisher, 3, policy)) == merged  # asked for again: an engine that was restarted
    assert Path(merged.place).stat().st_mtime_ns == written_ns
    Path(merged.place).unlink()
    assert read_verified(merger.merge(publish(publisher, 3, policy))).keys() == read_verified(merged).keys()


def test_the_file_has_the_share_of_its_rank_and_peft_s_names(tmp_path: Path, publisher: WeightPublisher) -> None:
    """r=8 on a model of hidden 1024; a wider one has a smaller share still."""
    folder, names = tmp_path / "wide", [f"layers.{layer}.{part}" for layer in range(2) for part in "qkvo"]
    folder.mkdir()
    save_file({f"{name}.weight": torch.randn(1024, 1024) for name in names}, folder / "model.safetensors")
    wide = WeightPublisher(tmp_path / "wide-published", "shm", model=folder)
    tensors = {f"base_model.model.{name}.lora_A.weight": torch.randn(8, 1024) for name in names}
    tensors |= {f"base_model.model.{name}.lora_B.weight": torch.randn(1024, 8) for name in names}
    manifest = wide.write_adapter(1, tensors.items(), {"r": 8, "lora_alpha": 16})
    full = (folder / "model.safetensors").stat().st_size
    assert manifest.bytes / full == pytest.approx(2 * 8 / 1024, rel=0.02)
    with safe_open(manifest.place, framework="pt") as file:
        assert set(file.keys()) == tensors.keys()


def test_sums_are_in_float32_and_rounded_once_to_the_engines_dtype(tmp_path: Path) -> None:
    """Whatever the folder's dtype; what the adapter leaves alone keeps its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    base = {"a.weight": torch.randn(40, 30).bfloat16(), "norm.weight": torch.randn(30), "t.weight": torch.randn(30, 40)}
    save_file(base, folder / "model.safetensors")
    low = {"lora_A": torch.randn(4, 30).bfloat16(), "lora_B": torch.randn(40, 4).bfloat16()}
    publisher = WeightPublisher(tmp_path / "published", "shm", model=folder)
    for module, transposed in (("a", False), ("t", True)):
        tensors = {f"base_model.model.{module}.{side}.weight": tensor for side, tensor in low.items()}
        config = {"r": 4, "lora_alpha": 2, "fan_in_fan_out": transposed}
        manifest = publisher.write_adapter(1 + transposed, tensors.items(), config)
        held = read_verified(Merger(folder, tmp_path / f"merged-{module}", "bfloat16").merge(manifest))
        added = 0.5 * (low["lora_B"].float() @ low["lora_A"].float())
        expected = base[f"{module}.weight"].float() + (added.t() if transposed else added)
        assert held[f"{module}.weight"].dtype == torch.bfloat16
        torch.testing.assert_close(held[f"{module}.weight"].float(), expected, rtol=2**-8, atol=1e-6)
        assert held["norm.weight"].dtype == torch.float32
        assert torch.equal(held["norm.weight"], base["norm.weight"])


def test_full_versions_and_deltas_go_on_around_adapters(tiny_model: str, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", keep=8, full_every=4, model=Path(tiny_model))
    merger, reader = Merger(Path(tiny_model), tmp_path / "merged", "float32"), WeightReader()
    policy = PeftPolicy(tiny_model)
    policy.train(2, seed=0)
    weights = load_file(Path(tiny_model) / "model.safetensors")
    for version in range(1, 7):
        weights["model.norm.weight"][version] += 1
        adapter = version == 4
        manifest = publish(publisher, version, policy) if adapter else publisher.write(version, weights.items())
        assert (manifest.base_version is None) == (version in (1, 4, 5))
        held = reader.read(merger.merge(manifest) if adapter else manifest)
        expected = policy.merged() if adapter else weights
        torch.testing.assert_close(held[f"{Q}.weight"], expected[f"{Q}.weight"], rtol=0, atol=2e-6)
        assert adapter or torch.equal(held["model.norm.weight"], weights["model.norm.weight"])


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"something_new": 1}, "something_new"),
    ({"peft_type": "LOHA"}, "LOHA"),
    ({"r": 0}, "rank"),
    ({"r": None}, "no r"),
    ({"alpha_pattern": {"q_proj": "much"}}, "alpha"),
    ({"rank_pattern": {"(q_proj": 4}}, "unterminated"),
    ({"rank_pattern": 4}, "cannot be read"),
    ({"lora_alpha": float("inf")}, "lora_alpha or a value of alpha_pattern is not a number"),
]


@pytest.mark.parametrize(("changes", "text"), UNSUPPORTED, ids=[text for _, text in UNSUPPORTED])
def test_settings_that_cannot_be_merged_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadAdapter, match=text):
        AdapterConfig.from_peft({"r": 8, "lora_alpha": 8, **changes})
    settings: Any = ["r", "lora_alpha"]
    with pytest.raises(BadAdapter, match="settings are a list"):
        AdapterConfig.from_peft(settings)


@pytest.mark.parametrize("start", [True, False, None, "gaussian"])
def test_start_that_keeps_the_base_is_supported(start: object) -> None:
    assert AdapterConfig.from_peft({"r": 8, "lora_alpha": 8, "init_lora_weights": start}).r == 8


def test_a_manifest_without_settings_is_refused(tiny_model: str, publisher: WeightPublisher, merger: Merger) -> None:
    manifest = publish(publisher, 1, PeftPolicy(tiny_model))
    for adapter in (None, {}, {"config": ["r"], "base": ""}, {"config": {"r": 8, "lora_alpha": 32}}):
        with pytest.raises(WeightsRefused, match="version 1"):
            merger.merge(Manifest.parse(manifest.as_dict() | {"adapter": adapter}))


def test_every_setting_of_this_peft_is_known(tiny_model: str) -> None:
    config = AdapterConfig.from_peft(PeftPolicy(tiny_model, lora_dropout=0.1).config())
    assert AdapterConfig.from_peft(config.as_dict()) == config


Change = Callable[[dict[str, Any]], Any]


def swap(name: str, tensor: Any) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "rank": (swap(A, torch.zeros(7, 64)), A),
    "the other side's rank": (swap(B, torch.zeros(128, 9)), B),
    "one side a stack": (swap(A, torch.zeros(2, 8, 64)), f"lora_A and lora_B of '{Q}' are of other numbers of experts"),
    "shape": (swap(B, torch.zeros(64, 8)), f"{Q}.weight"),
    "unknown module": (rename("layers.0", "layers.7"), r"layers\.7.*which the model folder does not have"),
    "names of another wrapper": (rename("lora_A", "lora_A.default"), r"lora_A\.default"),
    "missing half": (lambda tensors: tensors.pop(B), B),
    "no tensors": (lambda tensors: tensors.clear(), "has no tensors"),
    "bias": (swap(f"base_model.model.{Q}.lora_B.bias", torch.zeros(128)), "lora_B.bias"),
    "embedding": (swap("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 9)), "lora_embedding_A"),
    "integers": (swap(A, torch.zeros(8, 64, dtype=torch.int32)), "int32"),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_refused_by_name_on_both_sides(
    tiny_model: str, publisher: WeightPublisher, merger: Merger, change: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PeftPolicy(tiny_model)
    policy.train(1, seed=0)
    good = merger.merge(publish(publisher, 1, policy))
    tensors = policy.tensors()
    change(tensors)
    with pytest.raises(BadAdapter, match=text):
        publisher.write_adapter(2, tensors.items(), policy.config())
    assert [path.name for path in publisher.directory.iterdir()] == ["weights-00000001.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("penstock.weight_sync.publisher.changes_of", lambda *_: {})
        manifest = publisher.write_adapter(2, tensors.items(), policy.config())
    with pytest.raises(WeightsRefused, match=text):
        merger.merge(manifest)
    assert Path(good.place).is_file()


def test_damaged_bytes_are_refused_by_name(tiny_model: str, publisher: WeightPublisher, merger: Merger) -> None:
    policy = PeftPolicy(tiny_model)
    manifest = publish(publisher, 1, policy)
    data = bytearray(Path(manifest.place).read_bytes())
    data[-2] ^= 0xFF
    Path(manifest.place).write_bytes(data)
    with pytest.raises(WeightsRefused, match=manifest.tensors[-1].name):
        merger.merge(manifest)


@pytest.fixture
def own_model(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "own-model"))


def test_another_model_folder_than_the_trainers_is_refused(
    tiny_model: str, publisher: WeightPublisher, own_model: Path, tmp_path: Path
) -> None:
    manifest = publish(publisher, 1, PeftPolicy(tiny_model))
    file = own_model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file)
    with pytest.raises(WeightsRefused, match=f"other weights of version 0 than {own_model}"):
        Merger(own_model, tmp_path / "merged", "float32").merge(manifest)
    file.unlink()
    with pytest.raises(WeightsRefused, match="no safetensors"):
        Merger(own_model, tmp_path / "merged", "float32").merge(manifest)
    file.write_bytes(b"no tensors")
    with pytest.raises(WeightsRefused, match=r"model\.safetensors cannot be read"):
        Merger(own_model, tmp_path / "merged", "float32").merge(manifest)


def test_a_model_folder_that_changes_later_is_refused_by_tensor(
    tiny_model: str, publisher: WeightPublisher, own_model: Path, tmp_path: Path
) -> None:
    merger, policy = Merger(own_model, tmp_path / "merged", "float32"), PeftPolicy(tiny_model)
    merger.merge(publish(publisher, 1, policy))
    with (own_model / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x7f")
    with pytest.raises(WeightsRefused, match=r"version 0: tensor 'model\.norm\.weight' has checksum"):
        merger.merge(publish(publisher, 2, policy))
    assert not list((tmp_path / "merged").iterdir())


def test_a_head_that_is_the_embedding_cannot_change_alone(tmp_path: Path) -> None:
    for stored in (True, False):
        folder = tmp_path / f"model-{stored}"
        folder.mkdir()
        embedding = torch.randn(64, 16)
        tensors = {"model.embed_tokens.weight": embedding} | ({"lm_head.weight": embedding.clone()} if stored else {})
        save_file(tensors, folder / "model.safetensors")
        low = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 16)}
        low["base_model.model.lm_head.lora_B.weight"] = torch.ones(64, 2)
        publisher = WeightPublisher(tmp_path / f"published-{stored}", "shm", model=folder)
        with pytest.raises(BadAdapter, match=r"lm_head\.weight"):
            publisher.write_adapter(1, low.items(), {"r": 2, "lora_alpha": 2})


def test_no_room_and_no_time_are_tried_again_later(
    tiny_model: str, publisher: WeightPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(publisher, 1, PeftPolicy(tiny_model))
    late = Merger(Path(tiny_model), tmp_path / "late", "float32", deadline_s=-1)
    with pytest.raises(WeightsUnreachable, match="not merged in"):
        late.merge(manifest)
    assert not list((tmp_path / "late").iterdir())
    merger = Merger(Path(tiny_model), tmp_path / "merged", "float32")
    with monkeypatch.context() as patch:
        patch.setattr("penstock.weight_sync.files.file_format.HEADROOM_BYTES", 1 << 60)
        with pytest.raises(WeightsUnreachable, match="MiB free"):
            merger.merge(manifest)
    assert read_verified(merger.merge(manifest))
    merger.close()
    assert not list((tmp_path / "merged").iterdir())
    with pytest.raises(WeightsUnreachable, match="stops"):
        merger.merge(manifest)


# a model of one tensor -----------------------------------------------------------------------------------------------
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


def test_adapter_is_merged_into_floats_only(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    publisher = WeightPublisher(tmp_path / "published", "shm", model=tmp_path)
    with pytest.raises(BadAdapter, match=r"'a\.weight' of the model is int8"):
        publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2})


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
