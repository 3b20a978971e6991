"""No off-policy correction, as `trainer.correction` wants one: the benchmark's other side, in no recipe's reach."""

from __future__ import annotations

import torch

from penstock.trainer.corrections import Corrected, CorrectionInput

PATH = "benchmarks.support.uncorrected:uncorrected"


def uncorrected(batch: CorrectionInput) -> Corrected:
    """Stale tokens are taken for the present policy's own: every weight is 1."""
    ones = torch.ones_like(batch.proximal)
    return Corrected(ones, ones.bool())
