"""Turn-level GAE: a turn is one action. Its value is the critic's before its first token.

    δ_u = r_u + γ · V_{u+1} − V_u,   A_u = δ_u + γλ · A_{u+1}       over the turns of an episode
    every token of turn u gets A_u (then whitened over the trained tokens); the critic learns A_u + V_u at all of them

Schulman et al. 2015 (arXiv:1506.02438), equation 16, with turns for steps: Wang et al. 2025, "VAGEN"
(arXiv:2510.16907), the turn-wise half of its bi-level estimation; Wei et al. 2025, "Reinforcing
Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design" (arXiv:2505.11821).
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.advantages.gae import Share
from penstock.trainer.grouping import gae_of
from penstock.trainer.lazy_torch import torch


@ADVANTAGES.register("turn_gae", needs=("values",))
def turn_gae(batch: Episodes, *, gamma: Share = 1.0, lam: Share = 1.0) -> Advantages:
    assert batch.values is not None, "checked when the job starts"
    first = torch.ones_like(batch.token_turn, dtype=torch.bool)
    first[1:] = batch.token_turn[1:] != batch.token_turn[:-1]
    values = torch.zeros_like(batch.turn_rewards)
    values[batch.token_turn[first]] = batch.values[first]
    advantages = gae_of(batch.rewards_by_turn(), values, batch.turn_episode, gamma, lam)
    returns = (advantages + values)[batch.token_turn]
    return Advantages(advantages[batch.token_turn], returns=returns, whiten=True)
