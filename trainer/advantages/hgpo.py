"""HGPO: a hierarchy of groups. Turns are compared with those that share the state and 0, 1 … K states before it.

    G_u   = Σ_{v ≥ u} γ^(v − u) · r_v           over the later turns of the episode
    A^k_u = (G_u − mean(G)) / (std(G) + ε)      over the turns of the group with the same last k + 1 states; std with n
    A_u   = Σ_k w_k · A^k_u,    w_k ∝ (k + 1)^α  over the depths whose group says something (A^k_u ≠ 0)

He et al. 2026, "Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks" (arXiv:2602.22817), equations
3-7. A longer common history makes turns more alike and groups smaller: less bias, more variance. A turn whose episode
has no k states before it has no group of that depth. States are those of `gigpo`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes, state_groups
from penstock.trainer.grouping import centred, discounted, group_means
from penstock.trainer.lazy_torch import torch

EPSILON = 1e-6


@ADVANTAGES.register("hgpo", needs=("groups",))
def hgpo(
    batch: Episodes,
    *,
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95,
    history: Annotated[int, Field(ge=0)] = 2,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
) -> Advantages:
    returns = discounted(batch.rewards_by_turn(), batch.turn_episode, gamma)
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    for depth in range(1, history + 2):
        group = state_groups(batch, depth)
        shifted = centred(returns, group)
        advantages = shifted / (group_means(shifted.square(), group).sqrt() + EPSILON)
        weight = torch.where(advantages != 0, float(depth) ** alpha, 0.0)
        total, weights = total + weight * advantages, weights + weight
    return batch.per_turn(torch.where(weights > 0, total / weights, 0.0))
