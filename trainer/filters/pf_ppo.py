"""PF-PPO: policy filtration. Episodes whose reward says most are trained on more often.

    p_i ∝ |R_i|^power                 mode ``pow``
    p_i ∝ 1 for the best and the worst of the group, else 0      mode ``max_min``   (best-worst, BW)
    p_i ∝ 0.4 for the best of the group, else 0.1                mode ``max_random`` (best-random, BR)
    w_i = n · p_i / Σ p               over the n members of the episode's group

Shen & Zhang 2024, "Policy Filtration for RLHF to Mitigate Noise in Reward Models" (arXiv:2409.06957), section on
policy filtration. The paper draws n episodes with probabilities p; a weight n · p is what the draw is on average,
without its noise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.trainer.filters import FILTERS
from penstock.trainer.grouping import group_extremes, group_means
from penstock.trainer.lazy_torch import Tensor, torch
from penstock.transfer_queue import REWARD_TOLERANCE

EPSILON = 1e-8
"""Added to each weight: if every weight of a group is 0, all episodes weigh the same."""


@FILTERS.register("pf_ppo")
def pf_ppo(
    rewards: Tensor,
    group: Tensor,
    *,
    mode: Literal["pow", "max_min", "max_random"] = "pow",
    power: Annotated[float, Field(gt=0)] = 2.0,
) -> Tensor:
    lowest, highest = group_extremes(rewards, group)
    if mode == "pow":
        weights = rewards.abs() ** power
    elif mode == "max_min":
        weights = (_same(rewards, lowest) | _same(rewards, highest)).double()
    else:
        weights = torch.where(_same(rewards, highest), 0.4, 0.1).double()
    weights = weights + EPSILON
    return weights / group_means(weights, group)


def _same(rewards: Tensor, others: Tensor) -> Tensor:
    return (rewards - others).abs() <= REWARD_TOLERANCE * others.abs().clamp(min=1)
