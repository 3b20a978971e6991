"""GSPO: the ratio of a whole sequence, length-normalised, is clipped.

    s   = exp(mean over the segment of (logπ − logπ_prox))
    s_n = sg[s] · exp(logπ_n − sg[logπ_n])                       equal to s, with the gradient of one token
    L   = − min(s_n · A, clip(s_n, 1 − low, 1 + high) · A)        with trainer.aggregation episode_mean

Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv:2507.18071), equations 5-7 and 13 (GSPO-token, which
equals GSPO where all tokens of a sequence have one advantage). A sequence is a segment: what one prompt was answered
with.
"""

from __future__ import annotations

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss, clipped
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("gspo")
def gspo(batch: LossInput, *, clip_low: Positive = 3e-4, clip_high: Positive = 4e-4) -> TokenLoss:
    log_ratio = batch.segment_means((batch.logprobs - batch.proximal).detach())
    ratio = (batch.logprobs - batch.logprobs.detach() + log_ratio).clamp(max=10).exp()
    result = clipped(ratio, batch.advantages, clip_low, clip_high)
    return TokenLoss(batch.weights * result.per_token, result.metrics)
