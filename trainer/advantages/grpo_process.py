"""GRPO with process supervision: every turn's reward is compared with all turn rewards of the group.

    r̃_u = (r_u − mean(r)) / (std(r) + ε)        over all turns of the group; the outcome belongs to the last turn
    A_u = Σ_{v ≥ u} r̃_v                          over the later turns of the same episode

Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.3; a step is a turn. ε = 1e-6.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import discounted, standardised


@ADVANTAGES.register("grpo_process", needs=("groups",))
def grpo_process(batch: Episodes, *, epsilon: float = 1e-6) -> Advantages:
    normalised = standardised(batch.rewards_by_turn(), batch.group[batch.turn_episode], epsilon)
    return batch.per_turn(discounted(normalised, batch.turn_episode, 1.0))
