"""Truncated importance weights, per token.

    w = min(exp(logπ_prox − logπ_behave), cap)

Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561), section 4.1 (the truncated ρ); for the mismatch between a sampling
engine and a trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The
cap bounds the variance that rare tokens bring; weights below it are unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.corrections import CORRECTIONS


@CORRECTIONS.register("truncated_is")
def truncated_is(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    return torch.exp(proximal - behaviour).clamp(max=cap).detach()
