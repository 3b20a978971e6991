"""OPO: the baseline of least variance, under the assumption that a response's squared gradient grows with its length.

    b = Σ l_j · R_j / Σ l_j        over the episode's group, l = sampled tokens
    A_i = R_i − b

Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585), section on the optimal baseline. A
group whose rewards are all equal, or that has one member: A = 0.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import all_equal, group_means
from penstock.trainer.lazy_torch import torch


@ADVANTAGES.register("opo", needs=("groups",))
def opo(batch: Episodes) -> Advantages:
    baseline = group_means(batch.returns, batch.group, weights=batch.lengths)
    return batch.per_episode(torch.where(all_equal(batch.returns, batch.group), 0.0, batch.returns - baseline))
