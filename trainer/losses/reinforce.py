"""REINFORCE: the plain policy gradient, with the correction's weight if there is one.

    L = − w · A · logπ

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". It
has no trust region: the loss of RLOO, ReMax and OPO as their papers have them, one update per step.
"""

from __future__ import annotations

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss


@LOSSES.register("reinforce")
def reinforce(batch: LossInput) -> TokenLoss:
    return TokenLoss(-batch.weights * batch.advantages * batch.logprobs, {})
