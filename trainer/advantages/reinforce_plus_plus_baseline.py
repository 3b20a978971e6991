"""REINFORCE++-baseline: the group's mean is taken away, then everything is whitened over the whole step.

    A'_i = R_i − mean(R)                     over the episode's group
    A_n  = (A'_n − mean(A')) / std(A')       over all trained tokens of all ranks

Hu et al. 2025, "REINFORCE++" (arXiv:2501.03262), section on REINFORCE++ with baseline.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import centred


@ADVANTAGES.register("reinforce_plus_plus_baseline", needs=("groups",))
def reinforce_plus_plus_baseline(batch: Episodes) -> Advantages:
    return batch.per_episode(centred(batch.returns, batch.group), whiten=True)
