"""Tiny mixtures of experts of the families that docs/models.md names."""

from __future__ import annotations

from typing import Any

GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**QWEN, "norm_topk_prob": True, "tie_word_embeddings": False},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"] * 2},
    "Qwen3_5Moe": {**QWEN, **DELTA},
    "Qwen3Next": {**QWEN, **DELTA},
    "Glm4Moe": {**GROUPS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "DeepseekV3": {**GROUPS, **MLA, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "NemotronH": {
        **GROUPS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 16, "n_groups": 1},
        "moe_shared_expert_intermediate_size": 16,
        "num_hidden_layers": 4,
    },
}
