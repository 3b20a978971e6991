"""Losses that treat a few tokens in another way choose them among all trained tokens of a minibatch, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.trainer.config import TrainerConfig
from penstock.trainer.losses import LOSSES
from penstock.trainer.packing import Pack
from penstock.trainer.ranks import Ranks
from penstock.trainer.registry import options_of


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """All [M] → (A − mean A)(logπ − mean logπ), [M]"""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def choose_tokens(
    config: TrainerConfig, packs: Sequence[Pack], advantages: Tensor, step: int, ranks: Ranks
) -> Tensor | None:
    """advantages [N] → [N] bool; None where the loss has no choice to make. A collective."""
    loss = LOSSES.get(config.loss)
    choose = getattr(loss, "choose", None)
    if choose is None:
        return None
    mine = torch.zeros_like(advantages, dtype=torch.bool)
    logprobs = torch.zeros_like(advantages)
    for pack in packs:
        assert pack.proximal is not None, "a loss that chooses is scored first"
        mine[pack.token[pack.mask]] = True
        logprobs[pack.token] = pack.proximal.double()
    parts = ranks.gather_numbers(torch.stack([advantages[mine], logprobs[mine]]))
    everything = torch.cat(parts, dim=1)
    # The same draw on every rank, and again when a step is replayed.
    generator = torch.Generator().manual_seed(step)
    given = {**options_of(loss), **config.loss_options}
    settings = {name: given[name] for name in options_of(choose)}
    chosen = choose(covariances(everything[0], everything[1]), generator, **settings)
    start = sum(part.shape[1] for part in parts[: ranks.rank])
    mine[mine.clone()] = chosen[start : start + int(mine.sum())]
    return mine
