"""Losses of a service's clients, each against its formula in numpy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.trainer.service.losses import LOSSES

pytestmark = pytest.mark.torch
RNG = np.random.default_rng(3)
LP, Q = -RNG.exponential(1.0, 40), -RNG.exponential(1.0, 40)
A, W = RNG.normal(size=40), RNG.normal(size=40)
R = np.exp(LP - Q)
FORMULAS = [
    ("cross_entropy", {"weights": W}, -W * LP, -W),
    ("importance_sampling", {"logprobs": Q, "advantages": A}, -R * A, -R * A),
    (
        "ppo",
        {"logprobs": Q, "advantages": A, "clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        -np.minimum(R * A, np.clip(R, 0.7, 1.1) * A),
        -R * A * (np.clip(R, 0.7, 1.1) * A >= R * A),
    ),
    (
        "cispo",
        {"logprobs": Q, "advantages": A, "clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        -np.clip(R, 0.7, 1.1) * LP * A,
        -np.clip(R, 0.7, 1.1) * A,
    ),
    (
        "dro",
        {"logprobs": Q, "advantages": A, "beta": 0.3},
        -(LP * A - 0.15 * (LP - Q) ** 2),
        -(A - 0.3 * (LP - Q)),
    ),
]


@pytest.mark.parametrize(("name", "inputs", "expected", "slope"), FORMULAS, ids=[one[0] for one in FORMULAS])
def test_a_loss_and_its_gradient_are_those_of_its_formula(
    name: str, inputs: dict[str, np.ndarray], expected: np.ndarray, slope: np.ndarray
) -> None:
    lp = torch.tensor(LP, requires_grad=True)
    tensors = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in inputs.items()}
    loss = LOSSES[name].formula(lp, tensors)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(lp.grad.numpy(), slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_prompt_without_logprobs_adds_nothing(name: str) -> None:
    lp = torch.tensor([500.0, -1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-500.0, -1.0]), "advantages": torch.tensor([0.0, 2.0])}
    LOSSES[name].formula(
        lp, {**inputs, **{key: torch.tensor(value) for key, value in LOSSES[name].options.items()}}
    ).sum().backward()
    assert lp.grad.tolist() == [0.0, -2.0]
