"""LoRA: the adapter alone learns, is saved and published; everything else is the run's model, to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from trainer_support import make_job, newest, one_pack, save, train_one
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, Ranks, TrainerConfig, train
from penstock.trainer.config import LoraConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.lora import Adapter
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.weight_sync import HubNames, Manifest, Merger, read_verified

pytestmark = pytest.mark.torch
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
CONFIG = TrainerConfig(lr=1e-2, dtype="float32", lora=LORA, kl={"in_loss": 0.01})
MATRICES = 2 * 7
"""Of two layers: q, k, v, o, gate, up, down."""


def folder_weights(model: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(Path(model) / "model.safetensors")
    return found


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_before_training_it_is_the_model_and_only_matrices_learn(tiny_model: str, ranks: Ranks) -> None:
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    before = dict(engine.weights(torch.float32))
    given = folder_weights(tiny_model)
    assert before.keys() == given.keys()
    assert not changed(given, before)
    after = train_one(engine, ranks, 0)
    names = changed(given, after)
    assert len(names) == MATRICES
    assert all(name.endswith("_proj.weight") for name in names)
    assert len(engine.optimizer.state) == 2 * MATRICES, "no moments of anything else"
    assert engine.policy.adapter is not None
    with engine.policy.adapter.off():
        assert not changed(given, dict(engine.weights(torch.float32)))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_embedding_and_head_get_no_matrices(name: str, tiny_model: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(BadJob, match=rf"trainer\.lora\.targets has (model\.)?{name}: embedding and head"):
        Adapter(model, LoraConfig(rank=4, targets=("q_proj", name)), HubNames.of(model))


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (("q_proj", "gate_up_proj"), r"has gate_up_proj, and Qwen3MoeForCausalLM has no matrix of that name"),
        (("q_proj", "gate"), r"reaches gate.weight of the experts or their router.*: name modules of attention"),
        (r".*\.experts", r"is \.\*\\.experts: Target module"),
    ],
)
def test_a_name_that_reaches_no_linear_layer_is_refused(targets: Any, named: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, "Qwen3Moe", **experts))
    with pytest.raises(BadJob, match=rf"^trainer\.lora\.targets {named}"):
        Adapter(model, LoraConfig(rank=4, targets=targets), HubNames.of(model))


def test_targets_may_be_an_expression(tiny_model: str, tmp_path: Path, ranks: Ranks) -> None:
    config = CONFIG.model_copy(update={"lora": LoraConfig(rank=4, targets=r".*\.[qv]_proj")})
    engine = FSDPEngine(tiny_model, config, ranks)
    assert {name.split(".")[-3] for name, _ in engine.adapter_weights()} == {"q_proj", "v_proj"}
    engine.save_adapter(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == r".*\.[qv]_proj"


def test_in_bfloat16_only_the_matrices_have_masters(tmp_path: Path, ranks: Ranks) -> None:
    """The folder's own bits are kept as they are; its float32 twin would lose some, and is kept in float32."""
    model = save_tiny_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    half = str(tmp_path / "half")
    for folder, dtype in ((half, torch.bfloat16), (model, torch.float32)):
        engine = FSDPEngine(folder, CONFIG.model_copy(update={"dtype": "bfloat16"}), ranks)
        after = train_one(engine, ranks, 0)
        kinds = {parameter.dtype for parameter in engine.policy.parameters() if not parameter.requires_grad}
        assert kinds == {dtype}
        assert {p.dtype for p in engine.policy.parameters() if p.requires_grad} == {torch.float32}
        given = {name: tensor.float() for name, tensor in folder_weights(folder).items()}
        assert len(changed(given, after)) == MATRICES


def test_the_reference_is_the_model_without_its_adapter(tiny_model: str, ranks: Ranks) -> None:
    engine, pack = FSDPEngine(tiny_model, CONFIG, ranks), one_pack(tokens=60, vocab=64)
    (before,) = engine.score([pack])
    train_one(engine, ranks, 0)
    assert engine.reference is None, "no second copy of the weights"
    (reference,) = engine.score_reference([pack])
    (after,) = engine.score([pack])
    assert torch.equal(reference, before)
    assert not torch.equal(after, before)


def test_peft_says_of_the_saved_adapter_what_the_engine_says(tmp_path: Path, tiny_model: str, ranks: Ranks) -> None:
    from peft import PeftModel

    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    train_one(engine, ranks, 0)
    engine.save_adapter(tmp_path / "adapter")
    engine.save_model(tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    pack = one_pack(tokens=30, vocab=64)
    (found,) = engine.score([pack])
    both = (
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
    )
    for model in both:
        with torch.no_grad():
            rows = [model(input_ids=row[None]).logits[0].log_softmax(-1) for row in pack.ids.split(15)]
        expected = torch.cat(rows)[pack.predictors, pack.targets]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


async def test_a_run_publishes_adapters_alone_that_merge_to_its_weights(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"lora": LORA, "steps": 4})
    await train(job)
    published = {a.version: a.manifest for a in job.run.queue.announced}
    assert sorted(published) == [1, 2, 3, 4]
    for manifest in published.values():
        assert {entry["name"].split(".")[-2] for entry in manifest["tensors"]} == {"lora_A", "lora_B"}
        assert len(manifest["tensors"]) == 2 * MATRICES
        assert manifest["adapter"]["config"]["r"] == 4
    final = load_file(job.run_dir / "final_model" / "model.safetensors")
    merger = Merger(Path(tiny_model), tmp_path / "merged", "float32")
    whole = read_verified(merger.merge(Manifest.parse(published[4])))
    for name, tensor in final.items():
        torch.testing.assert_close(whole[name], tensor, atol=1e-6, rtol=0, msg=name)
    adapter = load_file(job.run_dir / "final_adapter" / "adapter_model.safetensors")
    assert adapter.keys() == {entry["name"] for entry in published[4]["tensors"]}


def test_a_checkpoint_holds_the_adapter_alone_and_the_next_step_is_bitwise_the_same(
    tmp_path: Path, tiny_model: str, ranks: Ranks
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    store = CheckpointStore(tmp_path, keep=2)
    store.open()
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    train_one(engine, ranks, 0)
    path = save(engine, ranks, store, 1)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {name.split(".")[-3] for name in saved if name.startswith("model.")} == {"lora_A", "lora_B"}
    expected = train_one(engine, ranks, 1)
    other, found = FSDPEngine(tiny_model, CONFIG, ranks), newest(store)
    other.load(found.path, found.ranks)
    assert not changed(expected, train_one(other, ranks, 1))
