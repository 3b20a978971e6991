"""Clip-Cov: a few tokens of high covariance get no gradient; all others PPO's clipped objective.

    L = − min(ρ · A, clip(ρ, 1 − low, 1 + high) · A)     ρ = exp(logπ − logπ_prox)
    L = 0                                                 for a share of all tokens, drawn at random among those with
                                                          lower < (A − mean A)(logπ − mean logπ) < upper

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617),
section on Clip-Cov. Covariances are those at the start of the step; tokens are chosen among all of the
minibatch.
"""

from __future__ import annotations

from penstock.trainer.lazy_torch import Tensor, torch
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss, clipped
from penstock.trainer.losses.decoupled_ppo import Positive
from penstock.trainer.losses.kl_cov import Share


def drawn(covariance: Tensor, generator: torch.Generator, *, share: float, lower: float, upper: float) -> Tensor:
    within = torch.nonzero((covariance > lower) & (covariance < upper)).squeeze(1)
    number = max(1, int(share * len(covariance)))
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    chosen[within[torch.randperm(len(within), generator=generator)[:number]]] = True
    return chosen


@LOSSES.register("clip_cov", choose=drawn)
def clip_cov(
    batch: LossInput,
    *,
    clip_low: Positive = 0.2,
    clip_high: Positive = 0.2,
    share: Share = 0.0002,
    lower: float = 1.0,
    upper: float = 5.0,
) -> TokenLoss:
    assert batch.chosen is not None
    result = clipped(batch.ratio, batch.advantages, clip_low, clip_high)
    per_token = torch.where(batch.chosen, 0.0, result.per_token)
    return TokenLoss(batch.weights * per_token, {**result.metrics, "chosen_fraction": batch.chosen})
