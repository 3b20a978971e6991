"""Truncated importance weights.

    w = min(π_prox / π_behave, cap)        of a token, of a whole segment (product), or its geometric mean

Espeholt et al. 2018, "IMPALA" (arXiv:1802.01561), section 4.1 (the truncated ρ); for the mismatch between a sampling
engine and a trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The
cap bounds the variance that rare tokens bring; weights below it are unbiased for a whole segment, and of low variance
for single tokens. Sequence level: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch"; geometric: the length-normalised ratio of Zheng et al. 2025
(arXiv:2507.18071).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput, Level
from penstock.trainer.lazy_torch import torch


@CORRECTIONS.register("truncated_is")
def truncated_is(
    batch: CorrectionInput, *, cap: Annotated[float, Field(gt=0)] = 2.0, level: Level = "token"
) -> Corrected:
    ratio = batch.ratio(level)
    return Corrected(ratio.clamp(max=cap), torch.ones_like(ratio, dtype=torch.bool))
