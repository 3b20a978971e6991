"""Off-policy corrections: an importance weight per sampled token, and which tokens are left out. One file each.

Weights carry no gradient. A token that is left out counts as 0 in the loss, and still counts in what the loss is
divided by: the indicator is part of the formula, not of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.common import Registry
from penstock.trainer.grouping import group_means, group_sums
from penstock.trainer.lazy_torch import Tensor

Level = Literal["token", "sequence", "geometric"]
"""Scope of a ratio: one token; all tokens of a segment, multiplied; their geometric mean."""


@dataclass(frozen=True, slots=True)
class CorrectionInput:
    """N trained tokens of one micro-batch; segments are whole in it. Nothing carries a gradient."""

    proximal: Tensor
    """[N] logprobs of the policy that the update must stay near"""
    behaviour: Tensor
    """[N] the engine's, when it sampled"""
    segment: Tensor
    """[N] int64 from 0"""

    def ratio(self, level: Level) -> Tensor:
        """[N] π_prox / π_behave, logarithms held within ±20: e²⁰ is finite and far beyond any bound."""
        difference = self.proximal - self.behaviour
        if level == "geometric":
            difference = group_means(difference, self.segment)
        elif level == "sequence":
            difference = group_sums(difference, self.segment)
        return difference.clamp(-20, 20).exp()


@dataclass(frozen=True, slots=True)
class Corrected:
    """The result of a correction."""

    weights: Tensor
    """[N] at least 0"""
    kept: Tensor
    """[N] bool; False: the token is left out of the loss"""


Correction = Callable[..., Corrected]
"""``(CorrectionInput, *, setting=default, …) → Corrected``; settings come from trainer.correction_options."""

CORRECTIONS: Registry[Correction] = Registry("off-policy correction", package="penstock.trainer.corrections")
