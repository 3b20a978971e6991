"""GRPO: group-relative policy optimisation.

    A_i = (r_i − mean(r)) / (std(r) + ε)        over the n members of the episode's group, std with n − 1

Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2, outcome supervision. ε = 1e-6.
A group whose rewards are all equal, or that has one member, says nothing about which episode was better: A = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.advantages import ADVANTAGES, GroupedRewards

EPSILON = 1e-6


@ADVANTAGES.register("grpo")
def grpo(batch: GroupedRewards) -> Tensor:
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group.unique():
        members = batch.group == group
        advantages[members] = normalised(batch.rewards[members])
    return advantages


def normalised(rewards_n: Tensor) -> Tensor:
    # Equality is asked of the rewards, not of the deviation: the mean of equal floats is not always that float.
    if bool((rewards_n == rewards_n[0]).all()):
        return torch.zeros_like(rewards_n)
    return (rewards_n - rewards_n.mean()) / (rewards_n.std() + EPSILON)
