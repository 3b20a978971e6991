"""The recipe for a large mixture of experts: every key is one, and the parts fit together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from penstock.deploy import load_config
from penstock.trainer import check_algorithm
from penstock.trainer.engines import check_engine
from penstock.trainer.engines.megatron import check_model

pytestmark = [pytest.mark.deep, pytest.mark.torch]
RECIPE = Path(__file__).parents[2] / "recipes/moe_megatron.yaml"

# config.json of Qwen/Qwen3-30B-A3B
SHAPE = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "vocab_size": 151936,
}


def test_the_recipe_fits_the_engine_the_model_and_the_algorithm() -> None:
    config = load_config(RECIPE)
    trainer = config.trainer
    assert trainer.engine == "megatron"
    check_engine(trainer)
    check_algorithm(trainer, config.group_size)
    check_model(SimpleNamespace(**SHAPE), trainer.parallel, config.model)
    assert trainer.micro_batch_tokens >= config.rollout.max_model_len, "the longest row fits into a pack"
    replicas = trainer.ranks // trainer.parallel.layout.ranks
    assert config.groups_per_step >= replicas
