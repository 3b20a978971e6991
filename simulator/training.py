"""How long a step trains: updates one after the other, each as long as its slowest rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.simulator.config import Trainer


def train_s(trainer: Trainer, tokens: Sequence[float], updates: int, seed: Sequence[int]) -> float:
    """Seconds for `tokens` (of each episode), in `updates` optimizer updates with everything that is done per token.

    T = Σ_updates ( max_ranks Σ tokens / tokens_per_s · (1 + scoring) + update_fixed_s ); step_fixed_s is not in it.
    """
    slowest = slowest_ranks(tokens, updates, trainer.ranks, trainer.balanced, seed)
    return sum(slowest) / trainer.tokens_per_s * (1 + trainer.scoring) + updates * trainer.update_fixed_s


def slowest_ranks(
    tokens: Sequence[float], updates: int, ranks: int, balanced: bool, seed: Sequence[int]
) -> list[float]:
    """Tokens of the fullest rank in each update. Episodes are dealt to updates and ranks at random, the same for all
    numbers of ranks; `balanced` then moves them so that ranks are equally full (longest first to the emptiest)."""
    order = np.random.default_rng([*seed, len(tokens)]).permutation(len(tokens))
    shuffled = np.asarray(tokens, dtype=float)[order]
    return [_fullest(part, ranks, balanced) for part in np.array_split(shuffled, updates)]


def _fullest(tokens: np.ndarray, ranks: int, balanced: bool) -> float:
    loads = np.zeros(ranks)
    if not balanced:
        np.add.at(loads, np.arange(len(tokens)) % ranks, tokens)
        return float(loads.max())
    for length in sorted(tokens, reverse=True):
        loads[loads.argmin()] += length
    return float(loads.max())
