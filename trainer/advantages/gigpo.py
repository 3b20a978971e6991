"""GiGPO: group in group. Episodes are compared with their group, and turns with the turns that answered the same state.

    A^E_i = (R_i − mean(R)) / F(R)              over the episode's group
    G_u   = Σ_{v ≥ u} γ^(v − u) · r_v           over the later turns of the episode
    A^S_u = (G_u − mean(G)) / F(G)              over the turns of the group with the same state
    A_u   = A^E_i + weight · A^S_u

Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv:2505.10978), equations 3 and 5-8.
F is the standard deviation (norm ``std``) or 1 (norm ``none``). The
state of a turn is what was fed right before it, or what the agent loop says: extra["turn_states"].
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes, state_groups
from penstock.trainer.grouping import centred, discounted, standardised
from penstock.trainer.lazy_torch import Tensor

EPSILON = 1e-6
Norm = Literal["std", "none"]


@ADVANTAGES.register("gigpo", needs=("groups",))
def gigpo(
    batch: Episodes,
    *,
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95,
    weight: Annotated[float, Field(ge=0)] = 1.0,
    norm: Norm = "std",
) -> Advantages:
    by_episode = normalised(batch.returns, batch.group, norm)
    returns = discounted(batch.rewards_by_turn(), batch.turn_episode, gamma)
    by_state = normalised(returns, state_groups(batch, depth=1), norm)
    return batch.per_turn(by_episode[batch.turn_episode] + weight * by_state)


def normalised(values: Tensor, group: Tensor, norm: Norm) -> Tensor:
    return standardised(values, group, EPSILON) if norm == "std" else centred(values, group)
