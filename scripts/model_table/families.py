"""The families of the table, each as a tiny random model: two or three layers, one of each kind that the family has.

`names` are tensors that the family's files on the hub have, one of each kind, with layer and expert numbers as the
tiny model has them: what is published must be called so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHAPE: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table."""

    name: str
    """As people call it."""
    kind: str
    """transformers' name of the classes, without ``Config`` and ``ForCausalLM``."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the tiny model's configuration; also what the hub's ``config.json`` has for engines alone."""
    names: Sequence[str] = ()
    """Tensors of its files on the hub, one of each kind."""
    lacks: Sequence[str] = ()
    """Settings of `SHAPE` that its configuration does not have."""

    def config(self, **changes: Any) -> Any:
        """transformers' configuration of the tiny model."""
        import transformers

        made = getattr(transformers, f"{self.kind}TextConfig", None) or getattr(transformers, f"{self.kind}Config")
        shape = {name: value for name, value in SHAPE.items() if name not in self.lacks}
        return made(**{**shape, **self.changes, **changes})

    def save(self, folder: Any) -> str:
        """`folder`, holding the tiny model in float32; always the same weights."""
        import torch
        import transformers

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = getattr(transformers, f"{self.kind}ForCausalLM")(self.config()).float()
            _leave_no_zeros(model)
        model.save_pretrained(folder)
        return str(folder)


def _leave_no_zeros(model: Any) -> None:
    """In place. A bias or a correction that starts at 0 would hide a mistake, and so would a state that is forgotten
    within a token."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-3.0, 0.0)
        elif parameter.abs().max() == 0:
            parameter.normal_(std=0.1)


def _layer(number: int, *names: str, root: str = "model.layers") -> tuple[str, ...]:
    return tuple(f"{root}.{number}.{name}.weight" for name in names)


def _qkvo(number: int = 0, *more: str) -> tuple[str, ...]:
    return _layer(number, *(f"self_attn.{one}_proj" for one in "qkvo"), *more)


def _mlp(number: int = 0, place: str = "mlp") -> tuple[str, ...]:
    return _layer(number, *(f"{place}.{one}_proj" for one in ("gate", "up", "down")))


def _experts(number: int, expert: int = 3) -> tuple[str, ...]:
    return (*_mlp(number, f"mlp.experts.{expert}"), *_layer(number, "mlp.gate"))


ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
NORMS = _layer(0, "input_layernorm", "post_attention_layernorm")
TIED = ENDS[:2]
PLAIN = (*ENDS, *NORMS, *_qkvo(), *_mlp())
PHI3 = (*(*ENDS, *NORMS), *_layer(0, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"))
DELTA_SIZES = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
DELTA = (
    *_layer(0, "linear_attn.conv1d", "linear_attn.norm", "linear_attn.out_proj"),
    "model.layers.0.linear_attn.A_log",
    "model.layers.0.linear_attn.dt_bias",
    *_qkvo(1, "self_attn.q_norm", "self_attn.k_norm"),
)
SHARED_EXPERT = (*_mlp(0, "mlp.shared_expert"), *_layer(0, "mlp.shared_expert_gate"))
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MANY = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {**MANY, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
MLA_SIZES = {
    "topk_method": "noaux_tc",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MLA = _layer(
    0,
    *(f"self_attn.{one}_proj" for one in ("q_a", "q_b", "kv_b", "o")),
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_layernorm",
)
SHARED_EXPERTS = (*_experts(1), *_mlp(1, "mlp.shared_experts"), "model.layers.1.mlp.gate.e_score_correction_bias")
MAMBA_SIZES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
    },
    "original_max_position_embeddings": 16,
}
NO_POSITIONS = ("max_position_embeddings",)


def _mamba(place: str) -> tuple[str, ...]:
    weights = (f"{place}.{one}.weight" for one in ("in_proj", "conv1d", "out_proj"))
    return (*weights, *(f"{place}.{one}" for one in ("A_log", "D", "dt_bias", "conv1d.bias")))


FAMILIES: Sequence[Family] = (
    Family("Qwen2, Qwen2.5", "Qwen2", names=(*PLAIN, *(f"model.layers.0.self_attn.{one}_proj.bias" for one in "qkv"))),
    Family("Qwen3", "Qwen3", names=(*PLAIN, *_layer(0, "self_attn.q_norm", "self_attn.k_norm"))),
    Family("Qwen3-MoE", "Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True}, (*ENDS, *NORMS, *_qkvo(), *_experts(0))),
    Family(
        "Qwen3-Next",
        "Qwen3Next",
        {**DELTA_SIZES, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
        (*ENDS, *DELTA, *_layer(0, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), *_experts(0), *SHARED_EXPERT),
    ),
    Family(
        "Qwen3.5",
        "Qwen3_5",
        DELTA_SIZES,
        (*ENDS, *DELTA, *_layer(0, *(f"linear_attn.in_proj_{one}" for one in ("qkv", "z", "a", "b"))), *_mlp()),
    ),
    Family(
        "Qwen3.5-MoE",
        "Qwen3_5Moe",
        {**DELTA_SIZES, **QWEN_EXPERTS, "shared_expert_intermediate_size": 16},
        (*ENDS, *DELTA, *SHARED_EXPERT, *_layer(0, "mlp.gate")),
    ),
    Family("Llama 3", "Llama", names=PLAIN),
    Family("Mistral", "Mistral", {"sliding_window": 16}, PLAIN),
    Family(
        "Gemma 2",
        "Gemma2",
        {
            "sliding_window": 16,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
        },
        (*TIED, *_qkvo(), *_mlp(), *NORMS, *_layer(0, "pre_feedforward_layernorm", "post_feedforward_layernorm")),
    ),
    Family(
        "Gemma 3",
        "Gemma3",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        (*TIED, *_qkvo(0, "self_attn.q_norm", "self_attn.k_norm"), *_mlp(), *NORMS),
    ),
    Family(
        "Gemma 4",
        "Gemma4",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
        },
        (
            *(*TIED, *_qkvo(0, "self_attn.q_norm", "self_attn.k_norm"), *_mlp(), *NORMS),
            *_layer(0, "per_layer_input_gate", "per_layer_projection"),
        ),
    ),
    Family("Phi-4", "Phi3", names=PHI3),
    Family("Phi-3.5, Phi-4-mini", "Phi3", LONGROPE, PHI3),
    Family(
        "Phi-3.5-MoE",
        "Phimoe",
        {**LONGROPE, "num_local_experts": 4},
        (
            *(*ENDS, *NORMS, *_qkvo(), *_layer(0, "block_sparse_moe.gate")),
            *_layer(0, *(f"block_sparse_moe.experts.3.w{one}" for one in "123")),
        ),
    ),
    Family(
        "GLM-4.5",
        "Glm4Moe",
        {**GROUPS, "use_qk_norm": True},
        (*ENDS, *NORMS, *_qkvo(0, "self_attn.q_norm", "self_attn.k_norm"), *_mlp(), *SHARED_EXPERTS),
    ),
    Family(
        "gpt-oss",
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (
            *ENDS,
            *NORMS,
            *_qkvo(),
            "model.layers.0.self_attn.sinks",
            *_layer(0, "mlp.router"),
            "model.layers.0.mlp.experts.gate_up_proj_bias",
            "model.layers.0.mlp.experts.down_proj_bias",
        ),
    ),
    Family("DeepSeek-V3", "DeepseekV3", {**GROUPS, **MLA_SIZES}, (*ENDS, *NORMS, *MLA, *_mlp(), *SHARED_EXPERTS)),
    Family(
        "DeepSeek-V3.2",
        "DeepseekV32",
        {**GROUPS, **MLA_SIZES, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
        (*ENDS, *NORMS, *MLA, *_layer(0, "self_attn.indexer.wq_b", "self_attn.indexer.wk"), *_mlp(), *SHARED_EXPERTS),
    ),
    Family(
        "Llama 4",
        "Llama4",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 16,
            "moe_layers": [1],
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        (
            *ENDS,
            *NORMS,
            *_qkvo(),
            *_mlp(0, "feed_forward"),
            *_mlp(1, "feed_forward.shared_expert"),
            *_layer(1, "feed_forward.router"),
            "model.layers.1.feed_forward.experts.gate_up_proj",
            "model.layers.1.feed_forward.experts.down_proj",
        ),
    ),
    Family(
        "Nemotron-H",
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
        (
            *(
                "backbone.embeddings.weight",
                "backbone.norm_f.weight",
                "lm_head.weight",
                "backbone.layers.0.norm.weight",
            ),
            *_mamba("backbone.layers.0.mixer"),
            *(f"backbone.layers.1.mixer.{one}_proj.weight" for one in "qkvo"),
            *(f"backbone.layers.2.mixer.{one}_proj.weight" for one in ("up", "down")),
        ),
    ),
    Family(
        "Granite hybrid",
        "GraniteMoeHybrid",
        {
            **MAMBA_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "logits_scaling": 2.0,
        },
        (
            *ENDS,
            *NORMS,
            *_mamba("model.layers.0.mamba"),
            *_qkvo(1),
            *_layer(0, *(f"block_sparse_moe.{one}" for one in ("input_linear", "output_linear", "router.layer"))),
            *_layer(0, "shared_mlp.input_linear", "shared_mlp.output_linear"),
        ),
    ),
    Family(
        "Bamba",
        "Bamba",
        {**MAMBA_SIZES, "attn_layer_indices": [1]},
        (
            *("model.embed_tokens.weight", "model.final_layernorm.weight", "lm_head.weight"),
            *_mamba("model.layers.0.mamba"),
            *_qkvo(1),
            *_mlp(0, "feed_forward"),
        ),
    ),
    Family(
        "Falcon-H1",
        "FalconH1",
        {**MAMBA_SIZES, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
        (
            *("model.embed_tokens.weight", "model.final_layernorm.weight", "lm_head.weight"),
            *_mamba("model.layers.0.mamba"),
            *_qkvo(0, "pre_ff_layernorm"),
            *_mlp(0, "feed_forward"),
        ),
    ),
    Family(
        "LFM2",
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_dim": 32, "block_dim": 32},
        (
            *("model.embed_tokens.weight", "model.embedding_norm.weight"),
            *_layer(0, "conv.conv", "conv.in_proj", "conv.out_proj", "operator_norm", "ffn_norm"),
            *_layer(0, *(f"feed_forward.w{one}" for one in "123")),
            *_layer(1, *(f"self_attn.{one}_proj" for one in "qkv"), "self_attn.out_proj"),
            *_layer(1, "self_attn.q_layernorm", "self_attn.k_layernorm"),
        ),
    ),
    Family(
        "Zamba 2",
        "Zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            **{"num_hidden_layers": 3, "num_key_value_heads": 4, "adapter_rank": 4},
            **{"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 16},
        },
        (
            *("model.embed_tokens.weight", "model.final_layernorm.weight", "model.layers.0.mamba.A_log"),
            *_layer(1, "linear", "mamba_decoder.mamba.in_proj", "shared_transformer.feed_forward.gate_up_proj"),
            *_layer(1, *(f"shared_transformer.self_attn.{one}_proj" for one in "qkvo")),
        ),
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemma",
        {"attention_window_size": 16, "block_types": ["recurrent", "attention"], "lru_width": 32},
        (
            *("model.embed_tokens.weight", "model.final_norm.weight"),
            "model.layers.0.temporal_block.rg_lru.recurrent_param",
            *_layer(0, "temporal_block.linear_x", "temporal_block.conv_1d", "mlp_block.gate_proj", "channel_pre_norm"),
            *_layer(1, *(f"temporal_block.{one}_proj" for one in "qkvo")),
        ),
        NO_POSITIONS,
    ),
    Family(
        "Doge",
        "Doge",
        {"keep_window_size": 16},
        (*TIED, *_qkvo(0, "self_attn.dt_proj"), "model.layers.0.self_attn.A", *_mlp(), *NORMS),
    ),
    Family(
        "MPT",
        "Mpt",
        {"max_seq_len": 256, "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
        (
            "transformer.wte.weight",
            *_layer(
                0, "attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj", "norm_1", root="transformer.blocks"
            ),
        ),
        (*NO_POSITIONS, "hidden_size", "num_attention_heads", "num_hidden_layers"),
    ),
    Family("Bloom", "Bloom", lacks=NO_POSITIONS),
)
