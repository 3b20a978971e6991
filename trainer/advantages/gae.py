"""GAE: generalised advantage estimation over sampled tokens, for PPO with a critic.

    δ_n = r_n + γ · V_{n+1} − V_n        V beyond the episode's last token is 0
    A_n = δ_n + γλ · A_{n+1}             then whitened over the trained tokens of all ranks
    the critic learns A_n + V_n          from A before whitening

Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv:1506.02438),
equation 16. Text of the environment between two turns has no tokens of the policy: n + 1 is the next sampled one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import gae_of

Share = Annotated[float, Field(ge=0, le=1)]


@ADVANTAGES.register("gae", needs=("values",))
def gae(batch: Episodes, *, gamma: Share = 1.0, lam: Share = 1.0) -> Advantages:
    assert batch.values is not None, "checked when the job starts"
    advantages = gae_of(batch.rewards_by_token(), batch.values, batch.token_episode, gamma, lam)
    return Advantages(advantages, returns=advantages + batch.values, whiten=True)
