"""REINFORCE++: discounted returns of tokens, whitened over the whole step.

    G_n = Σ_{m ≥ n} γ^(m − n) · r_m        over the later sampled tokens of the episode
    A_n = (G_n − mean(G)) / std(G)         over all trained tokens of all ranks

Hu et al. 2025, "REINFORCE++" (arXiv:2501.03262), section on global advantage normalisation. KL to the reference policy
is part of r: trainer.kl.in_reward.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import discounted


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: Episodes, *, gamma: Annotated[float, Field(gt=0, le=1)] = 1.0) -> Advantages:
    returns = discounted(batch.rewards_by_token(), batch.token_episode, gamma)
    return Advantages(returns, whiten=True)
