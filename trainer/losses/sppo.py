"""SPPO: the log-ratio of a whole episode is drawn to η times its win rate over one half.

    L(y) = (log π(y | x) / π_prox(y | x) − η · A)²        A = P̂(y ≻ π_prox | x) − 1/2, the estimator `sppo`

Wu et al. 2024, "Self-Play Preference Optimization for Language Model Alignment" (arXiv:2405.00675), section 4, the
practical algorithm. The opponent π_prox is the policy at the start of the step; log π(y | x) is the sum over the
trained tokens of all segments of the episode. η is 1 here; the paper has 10³ and a learning rate of 5e-7.
"""

from __future__ import annotations

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.losses.decoupled_ppo import Positive


@LOSSES.register("sppo", needs=("sequences",))
def sppo(batch: LossInput, *, eta: Positive = 1.0) -> TokenLoss:
    assert batch.sequences is not None
    miss = batch.sequences.ratio - eta * batch.advantages
    per_token = batch.of_sequences(miss.square(), 2 * miss)
    return TokenLoss(batch.weights * per_token, {"sequence_ratio": batch.sequences.ratio})
