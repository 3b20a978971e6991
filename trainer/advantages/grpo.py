"""GRPO: group-relative policy optimisation.

    A_i = (R_i − mean(R)) / (std(R) + ε)        over the n members of the episode's group, std with n − 1

Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2, outcome supervision. ε = 1e-6.
A group whose rewards are all equal, or that has one member, says nothing about which episode was better: A = 0.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import standardised


@ADVANTAGES.register("grpo", needs=("groups",))
def grpo(batch: Episodes, *, epsilon: float = 1e-6) -> Advantages:
    return batch.per_episode(standardised(batch.returns, batch.group, epsilon))
