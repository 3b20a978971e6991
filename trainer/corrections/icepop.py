"""IcePop: importance weights inside two bounds, nothing from tokens beyond either.

    w = ρ · 1[low ≤ ρ ≤ high],    ρ = π_prox / π_behave of a token

Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning to Trillion-Scale Thinking Model"
(arXiv:2510.18855), section on IcePop, equation of M(k); bounds 0.5 and 5 are theirs. A ratio far below 1 is as sure a
sign of mismatch as one far above.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput, Level


@CORRECTIONS.register("icepop")
def icepop(
    batch: CorrectionInput,
    *,
    low: Annotated[float, Field(ge=0)] = 0.5,
    high: Annotated[float, Field(gt=0)] = 5.0,
    level: Level = "token",
) -> Corrected:
    ratio = batch.ratio(level)
    return Corrected(ratio, (ratio >= low) & (ratio <= high))
