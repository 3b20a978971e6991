"""PRIME: process rewards that a reward model gives which learns from outcomes alone.

    r_t = β · (log π_φ(t) − log π_ref(t))           π_φ: the run's model before training, then trained by

    L_φ = −o · log σ(Σ_t r_t) − (1 − o) · log(1 − σ(Σ_t r_t))        o: the episode's reward, from 0 to 1

    A_t = Σ_{s ≥ t} γ^{s−t} · (r_s − mean_{j ≠ i} r̄_j) + R_i − mean_{j ≠ i} R_j

with r̄_j the mean of r over episode j's tokens, j over the other members of the group, π_ref the model before training.
Cui et al. 2025, "Process Reinforcement through Implicit Rewards" (arXiv:2502.01456), section 3. The implicit reward is
that of Yuan et al. 2024, "Free Process Rewards without Process Labels" (arXiv:2412.01981). The rewards of a step are
those of π_φ before it learns from that step; its learning rate is trainer.critic.lr. A group with one member has
advantage 0.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import discounted, group_means, group_sizes, sum_by
from penstock.trainer.lazy_torch import Tensor, torch


@ADVANTAGES.register("prime", needs=("groups", "implicit"))
def prime(
    batch: Episodes,
    *,
    beta: Annotated[float, Field(gt=0)] = 0.05,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
) -> Advantages:
    assert batch.process_rewards is not None  # beta is in them
    episode = batch.token_episode
    means = sum_by(batch.process_rewards, episode, len(batch.rewards)) / batch.lengths.clamp(min=1)
    steps = discounted(batch.process_rewards - others_mean(means, batch.group)[episode], episode, gamma)
    outcomes = batch.returns - others_mean(batch.returns, batch.group)
    compared = group_sizes(batch.group) > 1
    return Advantages(torch.where(compared[episode], steps + outcomes[episode], 0.0))


def others_mean(values: Tensor, group: Tensor) -> Tensor:
    """values [E] → [E] the mean over the other members of each one's group; of a single member its own"""
    sizes = group_sizes(group)
    return (group_means(values, group) * sizes - values) / (sizes - 1).clamp(min=1)


def outcome_loss(rewards: Tensor, rest: Tensor, outcome: Tensor) -> Tensor:
    """All [E]: Σ r of this pack's tokens (with gradient) and of the episode's others, o → L_φ [E]"""
    return torch.nn.functional.binary_cross_entropy_with_logits(rewards + rest, outcome, reduction="none")
