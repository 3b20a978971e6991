"""Decoupled PPO by hand: both clips, the correction's weight, and where no gradient may flow."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from penstock.trainer.losses import LOSSES, LossInput, TokenLoss  # noqa: E402

pytestmark = pytest.mark.torch


def loss(ratios: list[float], advantages: list[float], weights: list[float]) -> tuple[TokenLoss, torch.Tensor]:
    logprobs = torch.tensor([math.log(ratio) - 2.0 for ratio in ratios], requires_grad=True)
    given = LossInput(
        logprobs, torch.full((len(ratios),), -2.0), torch.tensor(advantages), torch.tensor(weights), 0.2, 0.28
    )
    return LOSSES.get("decoupled_ppo")(given), logprobs


def test_by_hand() -> None:
    result, logprobs = loss([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0], [1.0, 0.5, 1.0, 1.0, 2.0])
    # min(ρA, clip(ρ)A): 2; 1.28·2; 1.5·−2; 0.5·2; 0.8·−2 — each times −w
    assert result.per_token.tolist() == pytest.approx([-2.0, -1.28, 3.0, -1.0, 3.2])
    assert result.metrics["clip_fraction_high"].tolist() == [False, True, False, False, False]
    assert result.metrics["clip_fraction_low"].tolist() == [False, False, False, False, True]
    result.per_token.sum().backward()
    # ∂(−w·ρ·A)/∂logp = −w·ρ·A where no clip binds, 0 where one does
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, 3.0, -1.0, 0.0])


def test_at_the_proximal_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    result, logprobs = loss([1.0, 1.0], [0.7, -0.3], [1.0, 2.0])
    result.per_token.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.7, 0.6])
