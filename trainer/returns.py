"""Sums along the time of each episode, and the groups of turns that answered the same state."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.advantages import Episodes


def discounted(rewards: Tensor, episode: Tensor, gamma: float) -> Tensor:
    """rewards [M] in order of time, episode [M] → G_m = r_m + γ · G_{m+1} within the episode, [M]"""
    zeros = torch.zeros_like(rewards)
    return gae_of(rewards, zeros, episode, gamma, 1.0)


def gae_of(rewards: Tensor, values: Tensor, episode: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """A_m = δ_m + γλ · A_{m+1} with δ_m = r_m + γ · V_{m+1} − V_m within each episode; all [M], λ a number or [M]."""
    goes_on = torch.zeros_like(rewards)
    goes_on[:-1] = (episode[1:] == episode[:-1]).to(rewards.dtype)
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)] * goes_on
    deltas = rewards + gamma * following - values
    return _backward_sum(deltas, gamma * lam * goes_on)


def _backward_sum(deltas: Tensor, keep: Tensor) -> Tensor:
    """a_m = d_m + keep_m · a_{m+1}. A plain loop over floats: a step has some 10⁵ of them, and it is exact."""
    advantages = deltas.tolist()
    factors = keep.tolist()
    for index in range(len(advantages) - 2, -1, -1):
        advantages[index] += factors[index] * advantages[index + 1]
    return torch.tensor(advantages, dtype=deltas.dtype)


def state_groups(batch: Episodes, depth: int) -> Tensor:
    """[U] equal where turns of one group have the same last `depth` states; a turn with fewer is alone."""
    members = [batch.group[batch.turn_episode]]
    turns = torch.arange(len(batch.turn_state))
    first = torch.searchsorted(batch.turn_episode, batch.turn_episode)
    for back in range(depth):
        place = turns - back
        alone = place < first
        members.append(torch.where(alone, turns, batch.turn_state[place.clamp(min=0)]))
        members.append(alone.long())
    _, index = torch.stack(members).unique(dim=1, return_inverse=True)
    return index
