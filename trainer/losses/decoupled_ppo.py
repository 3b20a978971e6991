"""Decoupled PPO: the clip is around the proximal policy, the importance weight corrects for the behaviour policy.

    ρ   = exp(logπ − logπ_prox)
    L   = − w · min(ρ · A, clip(ρ, 1 − low, 1 + high) · A),     w ≈ π_prox / π_behave (a correction, no gradient)

Hilton et al. 2022, "Batch size-invariance for policy optimization" (arXiv:2110.00641), section 3; used for
asynchronous RL of language models by Fu et al. 2025, "AReaL" (arXiv:2505.24298), section 5.2. Unequal bounds:
"clip-higher", Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss, clipped

Positive = Annotated[float, Field(gt=0)]


@LOSSES.register("decoupled_ppo")
def decoupled_ppo(batch: LossInput, *, clip_low: Positive = 0.2, clip_high: Positive = 0.28) -> TokenLoss:
    result = clipped(batch.ratio, batch.advantages, clip_low, clip_high)
    return TokenLoss(batch.weights * result.per_token, result.metrics)
