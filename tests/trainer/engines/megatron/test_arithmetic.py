"""Arithmetic of a model from its description: what counting its matrices gives, and a mixture's by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import SHAPE, save_tiny_model

from penstock.trainer.engine import Flops
from penstock.trainer.engines.megatron.engine import flops_of

pytestmark = pytest.mark.torch

DENSE: dict[str, Any] = {
    "multi_latent_attention": False,
    "num_layers": SHAPE["num_hidden_layers"],
    "hidden_size": SHAPE["hidden_size"],
    "num_attention_heads": SHAPE["num_attention_heads"],
    "num_query_groups": SHAPE["num_key_value_heads"],
    "kv_channels": SHAPE["head_dim"],
    "ffn_hidden_size": SHAPE["intermediate_size"],
    "gated_linear_unit": True,
    "num_moe_experts": None,
}
MIXTURE = {**DENSE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": 1}


def test_a_dense_model_counts_as_its_matrices(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, tie_word_embeddings=False))
    assert flops_of(SimpleNamespace(**DENSE), SHAPE["vocab_size"]) == Flops.of(model, learns_all=True)


@pytest.mark.parametrize(
    ("changes", "mlps"),
    [
        # router 32·4, two of four experts of 3·32·48
        ({"moe_shared_expert_intermediate_size": None}, 2 * (128 + 2 * 4608)),
        # and a shared one of 3·32·16
        ({"moe_shared_expert_intermediate_size": 16}, 2 * (128 + 2 * 4608 + 1536)),
        # the other layer has a plain MLP of 3·32·64
        ({"moe_shared_expert_intermediate_size": None, "moe_layer_freq": 2}, 128 + 2 * 4608 + 6144),
        ({"moe_shared_expert_intermediate_size": None, "moe_layer_freq": [0, 1]}, 128 + 2 * 4608 + 6144),
    ],
)
def test_a_mixture_counts_what_one_token_meets(changes: dict[str, Any], mlps: int) -> None:
    found = flops_of(SimpleNamespace(**{**MIXTURE, **changes}), 64)
    # queries and output 32·32 each, keys and values 32·16 each, in two layers
    assert found == Flops(body=2 * (2048 + 1024) + mlps, head=32 * 64, attention=2 * 32, learns_all=True)


def test_latent_attention_is_not_counted() -> None:
    assert flops_of(SimpleNamespace(**{**DENSE, "multi_latent_attention": True}), 64) is None
