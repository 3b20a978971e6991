"""SPPO: how often an episode beats the policy that sampled it.

    A_i = P̂(y_i ≻ π | x) − 1/2        P̂ = mean over the other members j of its group of 1[R_i > R_j] + ½ · 1[R_i = R_j]

Wu et al. 2024, "Self-Play Preference Optimization for Language Model Alignment" (arXiv:2405.00675), section 4: the
win rate is estimated over K answers to the same prompt. Here an episode does not play itself, and the
preference between two is by their returns. A group with one member has advantage 0. Made for the loss `sppo`.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.lazy_torch import torch
from penstock.transfer_queue import REWARD_TOLERANCE


@ADVANTAGES.register("sppo", needs=("groups",))
def sppo(batch: Episodes) -> Advantages:
    returns, group = batch.returns, batch.group
    same = group[:, None] == group[None, :]
    same.fill_diagonal_(False)
    gap = returns[:, None] - returns[None, :]
    equal = gap.abs() <= REWARD_TOLERANCE * returns.abs().clamp(min=1)
    wins = torch.where(equal, 0.5, (gap > 0).double())
    rivals = same.sum(1)
    rate = (wins * same).sum(1) / rivals.clamp(min=1)
    return batch.per_episode(torch.where(rivals > 0, rate - 0.5, 0.0))
