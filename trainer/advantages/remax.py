"""ReMax: the reward of the greedy answer to the same task is the baseline.

    A_n = Σ_{m ≥ n} r_m − R_greedy

Li et al. 2023, "ReMax" (arXiv:2310.10505), algorithm 1.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import discounted


@ADVANTAGES.register("remax", needs=("greedy",))
def remax(batch: Episodes) -> Advantages:
    assert batch.greedy is not None, "checked when the job starts"
    returns = discounted(batch.rewards_by_token(), batch.token_episode, 1.0)
    return Advantages(returns - batch.greedy[batch.token_episode])
