"""megatron-core's own layers, where there is no Transformer Engine: plain torch operations on rows in a rectangle.

They have neither packed rows nor context or sequence parallelism. Their weights have other names than those with which
mbridge reckons: norms stand alone, and each expert is a module.
"""

from __future__ import annotations

import re
from typing import Any

PLAIN = {
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
    "moe_grouped_gemm": False,
}
"""Every fused kernel off: they are compiled for GPUs."""

LAYER = "model.layers.{layer_number}."


def use_local_layers(bridge: Any) -> None:
    """Let an mbridge `Bridge` build its model of these layers and know their weights."""
    import torch

    bridge.set_extra_args(**PLAIN, use_cpu_initialization=not torch.cuda.is_available())
    bridge._get_transformer_layer_spec = lambda vp_stage=None: _layer_spec(bridge.config)
    norm = {"pre_mlp_layernorm.weight": [f"{LAYER}post_attention_layernorm.weight"]}
    bridge._MLP_MAPPING = {**bridge._MLP_MAPPING, **norm}
    bridge._OTHER_MAPPING = {**bridge._OTHER_MAPPING, "input_layernorm.weight": [f"{LAYER}input_layernorm.weight"]}
    if bridge.config.num_moe_experts is not None:
        _name_experts_as_grouped(bridge)


def _layer_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


def _name_experts_as_grouped(bridge: Any) -> None:
    """mbridge tells experts by the names that they have in Transformer Engine's grouped layer."""
    local_to_global = bridge._weight_name_mapping_mcore_local_to_global

    def mapped(model: Any, consider_ep: bool = True) -> dict[str, str]:
        own = bridge.config.num_moe_experts // bridge.mpu.ep_size
        first = own * bridge.mpu.ep_rank if consider_ep else 0
        return {local: grouped_name(name, first) for local, name in local_to_global(model, consider_ep=False).items()}

    bridge._weight_name_mapping_mcore_local_to_global = mapped


def grouped_name(name: str, first_expert: int) -> str:
    """``….experts.local_experts.1.linear_fc1.weight`` → ``….experts.linear_fc1.weight5`` for `first_expert` 4; other
    names as they are."""
    found = re.fullmatch(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name)
    if found is None:
        return name
    prefix, number, layer = found.groups()
    return f"{prefix}.{layer}.weight{first_expert + int(number)}"
