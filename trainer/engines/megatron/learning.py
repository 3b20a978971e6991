"""megatron's distributed optimizer as the trainer uses it: look at the gradients, then take them or leave them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.sharded import Update


class Optimizer:
    """AdamW with masters and moments spread over data-parallel ranks. `updates` counts the steps that it has taken."""

    def __init__(self, models: Sequence[nn.Module], config: TrainerConfig) -> None:
        """After the models have their weights: the masters are copied from them."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        bfloat16 = config.dtype == "bfloat16"
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            use_distributed_optimizer=True,
            bf16=bfloat16,
            params_dtype=torch.bfloat16 if bfloat16 else torch.float32,
        )
        # Not None: then megatron would mark norms for no weight decay, which its scheduler alone heeds, and fsdp decays
        # all parameters.
        self.megatron: Any = get_megatron_optimizer(settings, list(models), config_overrides={})
        self._models: Sequence[Any] = models  # DistributedDataParallel of megatron
        self.updates = 0

    def step(self, lr: float, loss: float) -> Update:
        """One update with the gradients that are there, unless `loss` or they are not finite. A collective."""
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        # Both are sums over all ranks: every rank comes to the same decision.
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if finite:
            for group in self.megatron.param_groups:
                group["lr"] = lr
            self.megatron.step()
            self.updates += 1
        self.clear()
        return Update(grad_norm, lr, skipped=not finite, loss=loss)

    def clear(self) -> None:
        """Gradients are 0 again."""
        for model in self._models:
            model.zero_grad_buffer()
        self.megatron.zero_grad()
