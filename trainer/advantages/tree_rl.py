"""TreeRL: turns of episodes that share their beginnings (agent.forks) are the nodes of a tree.

    V(n)  = mean of R_i over the |L(n)| episodes that pass n          V(task): over the whole group
    A_u   = ((V(n_u) − V(task)) + (V(n_u) − V(n_{u−1}))) / √|L(n_u)|   n_0 is the task

Hou et al. 2025, "TreeRL: LLM Reinforcement Learning with On-Policy Tree Search" (arXiv:2506.11902): global and local
advantage. A step is a turn, and a node is all that an episode is up to the end of a turn. Every episode that shares a
turn trains on it, so that the root divides what would count √|L| times too much. Siblings give each turn its value
without a critic; an episode that shares nothing has twice its own advantage in its first turn and once after it.
"""

from __future__ import annotations

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.grouping import centred, group_means, group_sizes
from penstock.trainer.lazy_torch import torch


@ADVANTAGES.register("tree_rl", needs=("groups",))
def tree_rl(batch: Episodes) -> Advantages:
    assert batch.turn_path is not None, "made of the trajectories' ids"
    nodes = torch.stack([batch.group[batch.turn_episode], batch.turn_path])
    _, node = nodes.unique(dim=1, return_inverse=True)
    # With the task's value taken off first, it is 0, and equal returns give advantages of exactly 0.
    values = group_means(centred(batch.returns, batch.group)[batch.turn_episode], node)
    before = torch.zeros_like(values)
    follows = batch.turn_episode[1:] == batch.turn_episode[:-1]
    before[1:] = torch.where(follows, values[:-1], 0.0)
    return batch.per_turn((values + (values - before)) / group_sizes(node).double().sqrt())
