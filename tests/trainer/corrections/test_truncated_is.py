"""Truncated importance weights by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from penstock.trainer.corrections import CORRECTIONS  # noqa: E402

pytestmark = pytest.mark.torch


def test_by_hand_and_without_gradient() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0, 80.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.0 - math.log(1.5), -1.0 + math.log(4.0), -80.0])
    weights = CORRECTIONS.get("truncated_is")(proximal, behaviour, 2.0)
    assert weights.tolist() == pytest.approx([1.0, 1.5, 0.25, 2.0])
    assert not weights.requires_grad
