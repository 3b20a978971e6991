"""PPO's clipped objective, with dual clip for tokens of negative advantage.

    ρ = exp(logπ − logπ_prox)
    L = max(−ρ · A, −clip(ρ, 1 − low, 1 + high) · A)        and for A < 0 at most −c · A

Schulman et al. 2017 (arXiv:1707.06347), equation 7; dual clip: Ye et al. 2020, "Mastering Complex Control in MOBA
Games with Deep Reinforcement Learning" (arXiv:1912.09729), section on dual-clip PPO, c > 1; unequal bounds
("clip-higher", high 0.28): Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.1. Classical PPO, whose old policy is
the one that sampled, is this with `trainer.proximal: behaviour` and `trainer.correction: null`; with a correction the
loss is multiplied by its weights.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.lazy_torch import torch
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss, clipped
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("ppo")
def ppo(
    batch: LossInput,
    *,
    clip_low: Positive = 0.2,
    clip_high: Positive = 0.2,
    dual_clip: Annotated[float, Field(gt=1)] = 3.0,
) -> TokenLoss:
    result = clipped(batch.ratio, batch.advantages, clip_low, clip_high)
    most = -dual_clip * batch.advantages
    bound = (batch.advantages < 0) & (result.per_token > most)
    per_token = torch.where(bound, most, result.per_token)
    return TokenLoss(batch.weights * per_token, {**result.metrics, "dual_clip_fraction": bound})
