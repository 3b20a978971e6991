"""Decoupled PPO: the clip is around the proximal policy, the importance weight corrects for the behaviour policy.

    ρ   = exp(logπ − logπ_prox)
    L   = − w · min(ρ · A, clip(ρ, 1 − low, 1 + high) · A),     w ≈ π_prox / π_behave (a correction, no gradient)

Hilton et al. 2022, "Batch size-invariance for policy optimization" (arXiv:2110.00641), section 3; used for
asynchronous RL of language models by Fu et al. 2025, "AReaL" (arXiv:2505.24298), section 5.2. Unequal bounds:
"clip-higher", Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.1. With w = 1 this is PPO's clipped objective
(Schulman et al. 2017, arXiv:1707.06347, equation 7).
"""

from __future__ import annotations

import torch

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss


@LOSSES.register("decoupled_ppo")
def decoupled_ppo(batch: LossInput) -> TokenLoss:
    ratio = torch.exp(batch.logprobs - batch.proximal)
    clipped = ratio.clamp(1 - batch.clip_low, 1 + batch.clip_high)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    binding = clipped * batch.advantages < ratio * batch.advantages
    metrics = {
        "clip_fraction_low": binding & (batch.advantages < 0),
        "clip_fraction_high": binding & (batch.advantages > 0),
    }
    return TokenLoss(-batch.weights * surrogate, metrics)
