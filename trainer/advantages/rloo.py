"""RLOO: REINFORCE with the other members of the group as the baseline.

    A_i = R_i − 1/(n − 1) · Σ_{j ≠ i} R_j  =  n/(n − 1) · (R_i − mean(R))

Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740), section on RLOO; Kool et al. 2019, "Buy 4 REINFORCE Samples,
Get a Baseline for Free!". A group with one member has no others to compare with: A = 0.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import centred, group_sizes


@ADVANTAGES.register("rloo", needs=("groups",))
def rloo(batch: Episodes) -> Advantages:
    members = group_sizes(batch.group)
    return batch.per_episode(centred(batch.returns, batch.group) * members / (members - 1).clamp(min=1))
