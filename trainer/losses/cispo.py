"""CISPO: the importance weight is clipped, not the update: every token keeps its gradient.

    L = − sg[clip(ρ, 1 − low, 1 + high)] · A · logπ,     ρ = exp(logπ − logπ_prox)

MiniMax 2025, "MiniMax-M1" (arXiv:2506.13585), section 3.1, equations 4 and 5. The paper sets no lower bound: low 1 is
none.
"""

from __future__ import annotations

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("cispo")
def cispo(batch: LossInput, *, clip_low: Positive = 1.0, clip_high: Positive = 0.28) -> TokenLoss:
    ratio = batch.ratio.detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction_low": bounded > ratio, "clip_fraction_high": bounded < ratio}
    return TokenLoss(-batch.weights * bounded * batch.advantages * batch.logprobs, metrics)
