"""Layers whose activations are not kept for the backward but computed again: all of them, or the cheap ones.

    true        a layer keeps its input                                     one forward more: 4/3 of the arithmetic
    selective   also the outputs of attention and of every second product   half of the products more: 7/6

What is kept is torchtitan's policy (`op_sac_save_list`): of a dense layer of transformers the queries, values, the
gate and the MLP's output in addition to attention's. Products of experts by groups count like others; batched ones
(`bmm`) are always computed again, since attention without a kernel makes its L² scores with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
"""Kernels: their output is smaller than what computing it again costs."""


def recomputed(forward: Callable[..., Any], how: Literal[True, "selective"]) -> Callable[..., Any]:
    """`forward` of a layer, with the same result and gradients."""

    def contexts_of_a_call() -> Any:
        return create_selective_checkpoint_contexts(partial(_keep, Counter()))

    contexts: dict[str, Any] = {"context_fn": contexts_of_a_call} if how == "selective" else {}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs)

    return wrapped


def _keep(
    products: Counter[bool], context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """`products`: how many there were before, in the forward and when it is computed again."""
    name = operation.name().partition(".")[0] if isinstance(operation, torch._ops.OpOverload) else ""
    must_save = name in ATTENTION
    if name in ("aten::mm", "aten::addmm", "aten::_grouped_mm"):
        products[context.is_recompute] += 1
        must_save = products[context.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE
