"""How much arithmetic a model is, by megatron's description of it: a mixture computes with a part of its weights."""

from __future__ import annotations

from typing import Any

from penstock.trainer.flops import Flops


def flops_of(config: Any, vocab: int) -> Flops | None:
    """`config`: megatron's `TransformerConfig`. None for latent attention, whose matrices nobody counts here."""
    if config.multi_latent_attention:
        return None
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    attention = config.hidden_size * (2 * queries + 2 * keys)
    mixtures = _mixtures(config)
    mlps = (config.num_layers - mixtures) * _mlp(config, config.ffn_hidden_size)
    if mixtures:
        mlps += mixtures * _mixture(config)
    return Flops(
        body=config.num_layers * attention + mlps,
        head=config.hidden_size * vocab,
        attention=config.num_layers * queries,
        learns_all=True,
    )


def _mlp(config: Any, width: int) -> int:
    return (3 if config.gated_linear_unit else 2) * int(config.hidden_size) * width


def _mixture(config: Any) -> int:
    """Weights that one token meets: the router's, its experts', the shared expert's."""
    router = int(config.hidden_size * config.num_moe_experts)
    experts = config.moe_router_topk * _mlp(config, config.moe_ffn_hidden_size)
    return router + experts + _mlp(config, config.moe_shared_expert_intermediate_size or 0)


def _mixtures(config: Any) -> int:
    """Layers with experts: every n-th, or those that a list marks."""
    if not config.num_moe_experts:
        return 0
    every = config.moe_layer_freq
    return sum(every) if isinstance(every, list) else len(range(0, config.num_layers, every))
