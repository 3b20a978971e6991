"""How much arithmetic a step is, and what share of the device's peak that was (model FLOPs utilisation).

    forward of L tokens = 2 · P · L + 2 · layers · heads · D · Σ_r L_r²      P: weights of matrices, half of each square
    forward and backward = 3 · forward; 2 · forward where only LoRA's matrices need gradients of weights

Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B; of the update alone, without scoring and without what is
computed again in the backward. Head and embedding: the head for sampled tokens only, the embedding is no product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "MI300X": 1307.0}
"""Dense bfloat16, by a part of the device's name, from the vendors' data sheets (SXM variants)."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one model."""

    body: int
    """Weights of matrices inside the layers."""
    head: int
    attention: int
    """layers · heads · D"""
    learns_all: bool

    @classmethod
    def of(cls, model: PreTrainedModel, *, learns_all: bool) -> Flops | None:
        """Before the model is sharded. None for a mixture of experts: a token goes through a part of its weights."""
        if any(parameter.dim() == 3 for parameter in model.parameters()):  # all experts of a layer, stacked
            return None
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        body = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(body, head.weight.numel() if head else 0, config.num_hidden_layers * heads * width, learns_all)

    def of_update(self, tokens: int, sampled: int, squares: int) -> float:
        """Forward and backward of `tokens`, of which `sampled` go through the head; `squares` is Σ_r L_r²."""
        forward = 2 * (self.body * tokens + self.head * sampled + self.attention * squares)
        return (3 if self.learns_all else 2) * forward


def peak_tflops(given: float | None, device: torch.device, dtype: str) -> float | None:
    """Of one rank's device; None where nobody knows."""
    if given is not None or device.type != "cuda" or dtype != "bfloat16":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
