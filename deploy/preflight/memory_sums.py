"""How much memory the parts of a run take, as sums.

With P parameters, R ranks, L layers, hidden width h, query and key-value widths q and kv, MLP width i (of an expert
times the experts of a token), T tokens of a packed row, b bytes of the arithmetic:

    trainer, per rank  =  weights 4P/R + gradients 4P/R + moments 8P/R          fully sharded, masters in float32
                          + one gathered layer b·P/L  (twice where it is prefetched)
                          + activations T·b·L·(6h + 2q + 2kv + 3i); with recompute T·b·(L·h + one layer)
    with LoRA            gradients and moments of its matrices alone
    reference, critic    weights again; all of it again

    server             =  weights b·P + KV cache 2·L·kv·b·tokens
    in flight          =  (max_staleness + 1) · groups · members · tokens · 9 bytes in the queue

What a layer keeps for its backward is counted for a pre-norm block with a gated MLP and fused attention: inputs of
norms, projections and products (after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198, section 4, without dropout and attention matrices). It is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.model_files import Weights
from penstock.trainer import TrainerConfig
from penstock.transfer_queue import BYTES_PER_TOKEN

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = 4
"""float32: weights, gradients; two moments are two of it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one model; widths in elements."""

    parameters: int
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    lora: int
    """Parameters of LoRA's matrices per rank of theirs: Σ (rows + columns) of the layers' matrices."""


def shape_of(told: Mapping[str, Any], weights: Weights) -> Shape | None:
    """From ``config.json`` and the headers of the weights; None for a model whose config names its sizes otherwise."""
    try:
        hidden, heads = int(told["hidden_size"]), int(told["num_attention_heads"])
        head = int(told.get("head_dim") or hidden // heads)
        experts = int(told.get("num_experts_per_tok") or 1)
        mlp = int(told.get("moe_intermediate_size") or told["intermediate_size"]) * experts
        layers, key_value = int(told["num_hidden_layers"]), int(told.get("num_key_value_heads") or heads) * head
    except (KeyError, TypeError, ValueError):
        return None
    matrices = (shape for name, shape in weights.shapes.items() if len(shape) == 2 and ".layers." in f".{name}")
    return Shape(weights.parameters, layers, hidden, heads * head, key_value, mlp, sum(map(sum, matrices)))


def trainer_bytes(shape: Shape, trainer: TrainerConfig, longest: int, *, critic: bool) -> dict[str, float]:
    """Of one rank, by part. `longest`: tokens of the longest sequence."""
    learning = shape.lora * trainer.lora.rank or shape.parameters
    width = BYTES[trainer.dtype]
    copies = 1 + bool(critic) + trainer.kl.needs_reference
    return {
        "weights": copies * MASTER * shape.parameters / trainer.ranks,
        "gradients": (1 + bool(critic)) * MASTER * learning / trainer.ranks,
        "moments": (1 + bool(critic)) * 2 * MASTER * learning / trainer.ranks,
        "gathered layers": 2 * width * shape.parameters / shape.layers if trainer.ranks > 1 else 0,
        "activations": _activations(shape, trainer, max(trainer.micro_batch_tokens, longest)),
    }


def _activations(shape: Shape, trainer: TrainerConfig, tokens: int) -> float:
    layer = 6 * shape.hidden + 2 * shape.query + 2 * shape.key_value + 3 * shape.mlp
    kept = shape.layers * shape.hidden + layer if trainer.recompute else shape.layers * layer
    row = tokens / trainer.parallel.context
    return BYTES[trainer.dtype] * row * kept / (trainer.parallel.tensor * trainer.parallel.pipeline)


def server_bytes(shape: Shape, config: RunConfig, cached_tokens: int) -> dict[str, float]:
    """Of one rollout server: `cached_tokens` is what its KV cache holds."""
    width = BYTES[config.rollout.dtype]
    return {
        "weights": width * shape.parameters,
        "KV cache": 2 * shape.layers * shape.key_value * width * cached_tokens,
    }


def published_bytes(shape: Shape, config: RunConfig) -> float:
    """Three versions at once: the one that is read, the one that is written, and one in between."""
    return 3 * BYTES[config.rollout.dtype] * shape.parameters


def in_flight_bytes(config: RunConfig) -> float:
    """The longest episodes of all groups that the staleness bound lets be in the system; responses alone."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    return groups * config.group_size * config.agent.max_response_tokens * BYTES_PER_TOKEN
