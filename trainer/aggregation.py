"""From one loss per token to one number: the weight of each token, and what the sum is divided by.

    L = Σ_n w_n · l_n / D        n over the trained tokens of a minibatch on all ranks, e(n) the token's episode

    token_mean     w = 1                  D = trained tokens              DAPO (arXiv:2503.14476), equation 8
    episode_mean   w = 1 / tokens of e    D = episodes                    GRPO (arXiv:2402.03300), equation 3
    episode_sum    w = 1                  D = episodes                    sequence mean of token sums
    constant       w = 1                  D = episodes · length           Dr. GRPO (arXiv:2503.20783), section 3.2

An episode is the sequence, however many segments its tokens lie in: they share its weight. Episodes without a trained
token count nowhere. D is counted over all ranks before the first forward, so the split over packs and ranks changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.trainer.packing import Pack


def trained_tokens(packs: Sequence[Pack], episodes: int) -> Tensor:
    """[E] int64, trained tokens of each episode of this rank in `packs`"""
    counts = torch.zeros(episodes, dtype=torch.long)
    for pack in packs:
        counts += torch.bincount(pack.episode[pack.mask], minlength=episodes)
    return counts


def episode_weights(aggregation: str, tokens: Tensor) -> Tensor:
    """tokens [E] → [E] float64, the weight of each token of an episode"""
    if aggregation == "episode_mean":
        return 1.0 / tokens.clamp(min=1).double()
    return torch.ones(len(tokens), dtype=torch.float64)


def divisor(aggregation: str, tokens: float, episodes: float, length: int) -> float:
    """D from the trained tokens and the episodes that have any, of all ranks."""
    if aggregation == "token_mean":
        return tokens
    return episodes * length if aggregation == "constant" else episodes
