"""A mixture of experts in a Hugging Face folder, in a checkpoint and back, under the files' names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from trainer_support import newest, one_pack, save, train_one
from transformers import AutoModelForCausalLM

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.saved_model import save_tensors
from penstock.trainer.state.checkpoint import CheckpointStore

pytestmark = pytest.mark.torch
CONFIG = TrainerConfig(lr=1e-2, eps=1e-4)


@pytest.fixture(scope="module", params=["Qwen3Moe", "Mixtral"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    experts = {"Qwen3Moe": "num_experts", "Mixtral": "num_local_experts"}[request.param]
    changes = {experts: 4, "num_experts_per_tok": 2}
    changes |= {"moe_intermediate_size": 16} if request.param == "Qwen3Moe" else {}
    return save_tiny_model(tmp_path_factory.mktemp("mixture"), request.param, **changes)


def test_a_saved_mixture_has_the_tensors_of_its_files(mixture: str, tmp_path: Path, ranks: Ranks) -> None:
    engine = FSDPEngine(mixture, CONFIG, ranks)
    given = load_file(Path(mixture) / "model.safetensors")
    before = dict(engine.weights(torch.float32))
    assert before.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in before.items())
    after = train_one(engine, ranks, 0)
    assert any(not torch.equal(after[name], given[name]) for name in given if ".experts.2." in name)
    engine.save_model(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == given.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in stored.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    pack = one_pack(60, vocab=64)
    (expected,), (found,) = engine.score([pack]), FSDPEngine(str(tmp_path), CONFIG, ranks).score([pack])
    assert torch.equal(found, expected)


def test_a_mixture_resumes_from_its_checkpoint(mixture: str, tmp_path: Path, ranks: Ranks) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.open()
    engine = FSDPEngine(mixture, CONFIG, ranks)
    train_one(engine, ranks, 0)
    save(engine, ranks, store, 1)
    expected = train_one(engine, ranks, 1)
    other, found = FSDPEngine(mixture, CONFIG, ranks), newest(store)
    other.load(found.path, found.ranks)
    again = train_one(other, ranks, 1)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_a_large_model_is_written_in_several_files(mixture: str, tmp_path: Path, ranks: Ranks) -> None:
    engine = FSDPEngine(mixture, CONFIG, ranks)
    engine.save_model(tmp_path / "one")
    whole = load_file(tmp_path / "one" / "model.safetensors")
    save_tensors(iter(whole.items()), tmp_path / "several", file_bytes=20_000)
    (tmp_path / "several" / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 30_000 for file in files)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    again = dict(FSDPEngine(str(tmp_path / "several"), CONFIG, ranks).weights(torch.float32))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "several").state_dict()
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in twin.items())
