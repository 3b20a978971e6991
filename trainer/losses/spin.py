"""SPIN: a logistic loss separates the better episode of a pair from the worse one by how the policy changed.

    L(y, y') = −log σ(λ · (log π(y | x) / π_prox(y | x) − log π(y' | x) / π_prox(y' | x)))

Chen et al. 2024, "Self-Play Fine-Tuning Converts Weak Language Models to Strong Language Models" (arXiv:2401.01335),
section 4, with the logistic loss. The opponent π_prox is the policy at the start of the step. In the paper y is an
answer of a data set; the transfer queue carries sampled tokens alone, so here, as in verl's recipe `spin`, y is the
episode of the highest reward in its group and y' the one of the lowest (the first of equals). Each half of a
pair has half of its loss. Groups whose rewards are all equal, and all other episodes, carry none: advantages are not
used. Fine-tuning on a data set's answers is `penstock sft`.
"""

from __future__ import annotations

from penstock.trainer.lazy_torch import torch
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("spin", needs=("sequences", "groups"))
def spin(batch: LossInput, *, lam: Positive = 0.1) -> TokenLoss:
    assert batch.sequences is not None
    ratio, rival, side = batch.sequences.ratio, batch.sequences.rival, batch.sequences.side
    margin = lam * side * (ratio - rival)
    value = torch.where(side != 0, -torch.nn.functional.logsigmoid(margin) / 2, 0.0)
    slope = -lam * side * torch.sigmoid(-margin)
    paired = side != 0
    return TokenLoss(
        batch.weights * batch.of_sequences(value, slope),
        {"paired_fraction": paired, "spin_margin": torch.where(paired, margin, 0.0)},
    )
