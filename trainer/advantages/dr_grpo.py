"""Dr. GRPO: the group's mean is the baseline, and nothing is divided by a deviation.

    A_i = R_i − mean(R)        over the n members of the episode's group

Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783), section 3.2. Its
other half, a loss not divided by each response's length, is `trainer.aggregation: constant`.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import centred


@ADVANTAGES.register("dr_grpo", needs=("groups",))
def dr_grpo(batch: Episodes) -> Advantages:
    return batch.per_episode(centred(batch.returns, batch.group))
