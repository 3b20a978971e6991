"""Decoupled PPO by hand: both clips, the correction's weight, and where no gradient may flow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from trainer_support import loss_by_hand

pytestmark = pytest.mark.torch


def test_by_hand() -> None:
    ratios, advantages = [1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]
    result, logprobs = loss_by_hand("decoupled_ppo", ratios, advantages, weights=[1.0, 0.5, 1.0, 1.0, 2.0])
    # min(ρA, clip(ρ)A): 2; 1.28·2; 1.5·−2; 0.5·2; 0.8·−2 — each times −w
    assert result.per_token.tolist() == pytest.approx([-2.0, -1.28, 3.0, -1.0, 3.2])
    assert result.metrics["clip_fraction_high"].tolist() == [False, True, False, False, False]
    assert result.metrics["clip_fraction_low"].tolist() == [False, False, False, False, True]
    result.per_token.sum().backward()
    # ∂(−w·ρ·A)/∂logp = −w·ρ·A where no clip binds, 0 where one does
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, 3.0, -1.0, 0.0])


def test_at_the_proximal_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    result, logprobs = loss_by_hand("decoupled_ppo", [1.0, 1.0], [0.7, -0.3], weights=[1.0, 2.0])
    result.per_token.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.7, 0.6])
