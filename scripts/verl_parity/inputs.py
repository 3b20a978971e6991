"""One random batch, as verl wants it (padded, [B, T]) and as we do (sampled tokens alone, [N])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.advantages import Episodes

ROWS, LONGEST = 24, 40


@dataclass(frozen=True)
class Inputs:
    """B rows of up to T positions; tokens in row-major order where `mask` is 1."""

    mask: Tensor
    """[B, T] 1 = sampled; with holes where the environment spoke"""
    group: Tensor
    """[B] of unequal sizes, two members at least"""
    rewards: Tensor
    """[B]"""
    values: Tensor
    """[B, T]"""
    proximal: Tensor
    logprobs: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    """[B, T] one per row"""

    @classmethod
    def random(cls, seed: int, *, holes: bool = True, spread: float = 0.5) -> Inputs:
        """`spread`: how far apart the policies are, in standard deviations of logprobs."""
        generator = torch.Generator().manual_seed(seed)
        shape = (ROWS, LONGEST)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        lengths = torch.randint(4, LONGEST + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(LONGEST) < lengths).double()
        if holes:
            inner = torch.rand(shape, generator=generator) < 0.2
            # The last position of a row is sampled: a reward lies on it.
            mask = mask * (~inner | (torch.arange(LONGEST) == lengths - 1)).double()
        proximal = -normal(*shape).abs() - 0.1
        return cls(
            mask=mask,
            group=torch.arange(ROWS) // 3 * 2 // 3,
            rewards=normal(ROWS).round(decimals=1),
            values=normal(*shape),
            proximal=proximal,
            logprobs=proximal + spread * normal(*shape),
            behaviour=proximal + spread * normal(*shape),
            reference=proximal + spread * normal(*shape),
            advantages=normal(ROWS, 1).expand(shape).clone(),
        )

    def tokens(self, padded: Tensor) -> Tensor:
        """[B, T] → [N]"""
        return padded[self.mask.bool()]

    @property
    def row(self) -> Tensor:
        """[N]"""
        return self.tokens(torch.arange(ROWS)[:, None].expand(self.mask.shape))

    @property
    def token_level_rewards(self) -> Tensor:
        """[B, T] each row's reward on its last sampled position"""
        last = (self.mask * torch.arange(1, LONGEST + 1)).argmax(dim=1)
        rewards = torch.zeros_like(self.mask)
        rewards[torch.arange(ROWS), last] = self.rewards
        return rewards

    @property
    def index(self) -> np.ndarray:
        return self.group.numpy()

    def episodes(self, **changes: Any) -> Episodes:
        """Every row an episode of one turn."""
        tokens = int(self.mask.sum())
        given: dict[str, Any] = {
            "rewards": self.rewards,
            "group": self.group,
            "turn_rewards": torch.zeros(ROWS, dtype=torch.float64),
            "turn_episode": torch.arange(ROWS),
            "turn_state": torch.arange(ROWS),
            "token_turn": self.row,
            "token_rewards": torch.zeros(tokens, dtype=torch.float64),
            "trained": torch.ones(tokens, dtype=torch.bool),
            **changes,
        }
        return Episodes(**given)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach().double()).abs().max())
