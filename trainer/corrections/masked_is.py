"""MIS, masked importance sampling: importance weights, and 0 if the weight would be too large.

    w = ρ · 1[ρ ≤ cap],    ρ = π_prox / π_behave       of a token, of a whole segment (product), or its geometric mean

Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
sequence-level masking: truncation keeps a wrong gradient of bounded size, masking drops it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput, Level


@CORRECTIONS.register("masked_is")
def masked_is(
    batch: CorrectionInput, *, cap: Annotated[float, Field(gt=0)] = 2.0, level: Level = "sequence"
) -> Corrected:
    ratio = batch.ratio(level)
    return Corrected(ratio, ratio <= cap)
