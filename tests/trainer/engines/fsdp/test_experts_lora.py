"""Low-rank matrices of experts that are one stack: products, gradients, published and merged weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from mixtures import FAMILIES, QWEN
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from torch.func import functional_call
from trainer_support import one_pack, train_one
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.experts import is_called_by_experts
from penstock.trainer.engines.fsdp.experts_lora import ExpertsLora
from penstock.weight_sync import Merger, WeightPublisher

pytestmark = pytest.mark.torch
LORA: dict[str, Any] = {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "experts"]}
KINDS = ["Qwen3Moe", "GptOss", "NemotronH", "Qwen3_5Moe"]
"""Matrices in the files one by one and as stacks, with and without a gate, transposed and with biases."""


def config_of(**lora: Any) -> TrainerConfig:
    return TrainerConfig(lr=1e-2, dtype="float32", lora={**LORA, **lora}, kl={"in_loss": 0.01})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_tiny_model(tmp_path_factory.mktemp(kind), kind, **FAMILIES[kind]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_the_sum(kind: str, models: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    experts = next(one for one in model.modules() if is_called_by_experts(one))
    plain = deepcopy(experts)
    lora = ExpertsLora(experts, 8, 0.5, torch.Generator().manual_seed(0))
    low = [side for name in lora.stacks for side in lora.sides(name)]
    torch.manual_seed(0)
    for side in low:
        torch.nn.init.normal_(side, std=0.3)
    hidden = torch.randn(11, model.config.get_text_config().hidden_size, requires_grad=True)
    # Of the last two experts one has no token, the other all of one choice.
    chosen = torch.stack([torch.randint(0, 6, (11,)), torch.full((11,), 7)], dim=1)
    weights, over = torch.rand(11, 2), torch.randn(11, hidden.shape[-1])

    def summed() -> Any:
        stacks = {name: getattr(experts, name) + 0.5 * b @ a for name in lora.stacks for a, b in [lora.sides(name)]}
        return functional_call(plain, stacks, (hidden, chosen, weights))

    found, expected = (
        [outputs, *torch.autograd.grad((outputs * over).sum(), [hidden, *low])]
        for outputs in (experts(hidden, chosen, weights), summed())
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.detach().abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_servers_merge_what_the_trainer_computes_with(
    kind: str, models: dict[str, str], tmp_path: Path, ranks: Ranks
) -> None:
    engine, pack = FSDPEngine(models[kind], config_of(), ranks), one_pack(tokens=30, vocab=64)
    given = dict(engine.weights(torch.float32))
    train_one(engine, ranks, 0)
    learned = dict(engine.weights(torch.float32))
    changed = {name for name, tensor in given.items() if not torch.equal(tensor, learned[name])}
    assert any("experts" in name for name in changed)
    assert all("experts" in name or "q_proj" in name for name in changed)
    settings = engine.adapter_settings
    assert settings is not None
    publisher = WeightPublisher(tmp_path / "weights", "disk", model=Path(models[kind]))
    manifest = publisher.write_adapter(1, engine.adapter_weights(), settings)
    merged = load_file(Merger(Path(models[kind]), tmp_path / "merged", "float32").merge(manifest).place)
    for name, tensor in learned.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0, msg=name)
    engine.save_model(tmp_path / "whole")
    whole = FSDPEngine(str(tmp_path / "whole"), TrainerConfig(dtype="float32"), ranks)
    torch.testing.assert_close(engine.score([pack]), whole.score([pack]), atol=1e-5, rtol=0)


def test_peft_says_of_saved_experts_what_the_engine_says(models: dict[str, str], tmp_path: Path, ranks: Ranks) -> None:
    from peft import PeftModel

    engine, pack = FSDPEngine(models["Qwen3Moe"], config_of(), ranks), one_pack(tokens=30, vocab=64)
    train_one(engine, ranks, 0)
    engine.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(models["Qwen3Moe"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        rows = [model(input_ids=row[None]).logits[0].log_softmax(-1) for row in pack.ids.split(15)]
    expected = torch.cat(rows)[pack.predictors, pack.targets]
    torch.testing.assert_close(engine.score([pack])[0], expected, atol=1e-5, rtol=0)


def test_the_reference_is_the_model_without_its_experts_matrices(models: dict[str, str], ranks: Ranks) -> None:
    engine, pack = FSDPEngine(models["Qwen3Moe"], config_of(targets="experts"), ranks), one_pack(tokens=60, vocab=64)
    (before,) = engine.score([pack])
    train_one(engine, ranks, 0)
    assert not torch.equal(engine.score([pack])[0], before)
    assert torch.equal(engine.score_reference([pack])[0], before)


@pytest.mark.parametrize(
    ("kind", "changes", "lora", "message"),
    [
        ("Qwen3", {}, {}, r"has experts, and Qwen3ForCausalLM has no experts that are one stack.*: remove it"),
        ("Qwen3Moe", QWEN, {"rank": 12}, r"has experts, and trainer\.lora\.rank 12 is no multiple of 8: set it to 16"),
    ],
)
def test_what_gets_no_matrices_is_refused_by_name(
    kind: str, changes: dict[str, Any], lora: dict[str, Any], message: str, tmp_path: Path, ranks: Ranks
) -> None:
    with pytest.raises(BadJob, match=rf"^trainer\.lora\.targets {message}"):
        FSDPEngine(save_tiny_model(tmp_path, kind, **changes), config_of(**lora), ranks)
