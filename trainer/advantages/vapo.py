"""VAPO's length-adaptive, decoupled GAE: long episodes look further ahead, and the critic learns from whole returns.

    λ_policy = 1 − 1/(α · l)     l = sampled tokens of the episode, at least 0; for the advantages, whitened
    λ_critic = 1                  for what the critic learns

Yue et al. 2025, "VAPO" (arXiv:2504.05118), sections 4.2 (length-adaptive GAE, α = 0.05) and 4.1 (decoupled GAE and
value pre-training, from Yuan et al. 2025, "VC-PPO", arXiv:2503.01491). Value pre-training is
trainer.critic.warmup_steps.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.advantages.gae import Share
from penstock.trainer.grouping import gae_of


@ADVANTAGES.register("vapo", needs=("values",))
def vapo(batch: Episodes, *, gamma: Share = 1.0, alpha: Annotated[float, Field(gt=0)] = 0.05) -> Advantages:
    assert batch.values is not None, "checked when the job starts"
    rewards, episode = batch.rewards_by_token(), batch.token_episode
    adaptive = (1 - 1 / (alpha * batch.lengths)).clamp(min=0)[episode]
    advantages = gae_of(rewards, batch.values, episode, gamma, adaptive)
    returns = gae_of(rewards, batch.values, episode, gamma, 1.0) + batch.values
    return Advantages(advantages, returns=returns, whiten=True)
