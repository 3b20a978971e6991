"""Truncated importance weights by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from penstock.trainer.corrections import CORRECTIONS, CorrectionInput

pytestmark = pytest.mark.torch


def test_by_hand_and_finite_where_the_ratio_is_not() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0, 80.0])
    behaviour = torch.tensor([-1.0, -1.0 - math.log(1.5), -1.0 + math.log(4.0), -80.0])
    given = CorrectionInput(proximal, behaviour, torch.zeros(4, dtype=torch.long))
    found = CORRECTIONS.get("truncated_is")(given)
    assert found.weights.tolist() == pytest.approx([1.0, 1.5, 0.25, 2.0])
    assert found.kept.all()
