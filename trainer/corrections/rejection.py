"""Rejection sampling: tokens or segments too far from the engine's policy are left out, the others weigh 1.

    w = 1[low ≤ ρ ≤ high],    ρ = π_prox / π_behave      of a token, of a whole segment (product), or its geometric mean

Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
sequence-level masking with weight 1 for what is kept: a trust region of hard bounds. The geometric mean does not
drift with length, so long segments are not rejected for being long.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput, Level
from penstock.trainer.lazy_torch import torch


@CORRECTIONS.register("rejection")
def rejection(
    batch: CorrectionInput,
    *,
    low: Annotated[float, Field(ge=0)] = 0.5,
    high: Annotated[float, Field(gt=0)] = 2.0,
    level: Level = "geometric",
) -> Corrected:
    ratio = batch.ratio(level)
    return Corrected(torch.ones_like(ratio), (ratio >= low) & (ratio <= high))
