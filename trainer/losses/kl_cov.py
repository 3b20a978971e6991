"""KL-Cov: the few tokens whose covariance would make entropy fall fastest are held to the proximal policy.

    L = − ρ · A                                  ρ = exp(logπ − logπ_prox)
    L = − ρ · A + β · |logπ − logπ_prox|         for the share k of all tokens with the largest
                                                 (A − mean A)(logπ − mean logπ)

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617),
section on KL-Cov. Covariances are those at the start of the step; tokens are chosen among all of the
minibatch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.lazy_torch import Tensor, torch
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.losses.decoupled_ppo import Positive

Share = Annotated[float, Field(gt=0, le=1)]


def largest(covariance: Tensor, generator: torch.Generator, *, share: float) -> Tensor:
    number = min(len(covariance), max(1, int(share * len(covariance))))
    chosen = torch.zeros(len(covariance), dtype=torch.bool)
    chosen[covariance.topk(number).indices] = True
    return chosen


@LOSSES.register("kl_cov", choose=largest)
def kl_cov(batch: LossInput, *, share: Share = 0.0002, kl_weight: Positive = 1.0) -> TokenLoss:
    assert batch.chosen is not None
    penalty = kl_weight * (batch.logprobs - batch.proximal).abs()
    per_token = -batch.ratio * batch.advantages + torch.where(batch.chosen, penalty, 0.0)
    return TokenLoss(batch.weights * per_token, {"chosen_fraction": batch.chosen})
