"""SAPO: a smooth gate in the place of the hard clip, steeper for tokens of negative advantage.

    L = − σ(τ · (ρ − 1)) · 4/τ · A,     τ = tau_positive where A > 0, else tau_negative,     ρ = exp(logπ − logπ_prox)

Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347), its gate f; the gradient's weight is 1 at ρ =
1 and falls off on both sides. The paper averages by sequence: trainer.aggregation episode_mean.
"""

from __future__ import annotations

from penstock.trainer.lazy_torch import torch
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("sapo")
def sapo(batch: LossInput, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> TokenLoss:
    positive = batch.advantages > 0
    tau = torch.where(positive, tau_positive, tau_negative).to(batch.logprobs.dtype)
    gate = torch.sigmoid(tau * (batch.ratio - 1)) * 4 / tau
    return TokenLoss(-batch.weights * gate * batch.advantages, {})
