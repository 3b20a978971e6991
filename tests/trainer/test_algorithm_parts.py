"""Aggregation, KL, overlong shaping, the proximal policy, episode filters: by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer_support import make_segment

from penstock.trainer import ModelLimits, Pack, make_row
from penstock.trainer.config import OverlongConfig
from penstock.trainer.credit import overlong_penalties
from penstock.trainer.filters import FILTERS
from penstock.trainer.loss import (
    ESTIMATORS,
    divisor,
    episode_weights,
    proximal_logprobs,
    steered,
    trained_tokens,
    value_loss,
)
from penstock.trainer.packing import join_rows

pytestmark = pytest.mark.torch
LIMITS = ModelLimits(context=64, vocab=64)


def pack_of(version: int, step: int) -> Pack:
    segment = make_segment(np.random.default_rng(0), version)
    return join_rows([make_row(0, segment, "", step=step, bound=9, model=LIMITS)])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 12 / 4), ("episode_mean", (2 + 6) / 2), ("episode_sum", 12 / 2), ("constant", 12 / 20)],
)
def test_four_ways_to_one_number(aggregation: str, expected: float) -> None:
    """Losses 1, 2, 3 of one episode, 6 of another, none of a third."""
    tokens = torch.tensor([3, 1, 0])
    weights = episode_weights(aggregation, tokens)
    total = float((weights * torch.tensor([6.0, 6.0, 0.0])).sum())
    assert total / divisor(aggregation, 4, 2, length=10) == pytest.approx(expected)


def test_an_episodes_tokens_are_counted_over_its_segments() -> None:
    rng = np.random.default_rng(0)
    rows = [make_row(e, make_segment(rng, 0), "", step=0, bound=0, model=LIMITS) for e in (0, 0, 2)]
    one = len(rows[0].targets)
    assert trained_tokens([join_rows(rows[:1]), join_rows(rows[1:])], 3).tolist() == [2 * one, 0, one]


def test_kl_estimators() -> None:
    difference = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    assert ESTIMATORS["k1"](difference).tolist() == [0.0, 1.0, -2.0]
    assert ESTIMATORS["k2"](difference).tolist() == [0.0, 0.5, 2.0]
    k3 = [0.0, math.exp(-1), math.exp(2) - 3]
    assert ESTIMATORS["k3"](difference).tolist() == pytest.approx(k3)
    assert ESTIMATORS["low_variance"](torch.tensor([1.0, -50.0])).tolist() == pytest.approx([k3[1], 10.0])


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_estimators_are_right_on_average(name: str) -> None:
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    expected = (p * (p.log() - q.log())).sum()
    assert float((p * ESTIMATORS[name](p.log() - q.log())).sum()) == pytest.approx(float(expected))


def test_the_coefficient_is_steered_to_its_target() -> None:
    assert steered(0.1, measured=6.6, target=6.0, episodes=100, horizon=1000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert steered(0.1, measured=60.0, target=6.0, episodes=100, horizon=1000) == pytest.approx(0.1 * 1.02)
    assert steered(0.1, measured=0.0, target=6.0, episodes=100, horizon=1000) == pytest.approx(0.1 * 0.98)
    assert steered(0.1, measured=60.0, target=None, episodes=100, horizon=1000) == 0.1


def test_long_episodes_are_punished_gradually() -> None:
    config = OverlongConfig(length=20, buffer=8, penalty=0.5)
    found = overlong_penalties(np.array([5, 12, 14, 20, 30]), config)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.125, -0.5, -0.5])
    sharp = overlong_penalties(np.array([19, 20]), OverlongConfig(length=20))
    assert sharp.tolist() == [0.0, -1.0]
    assert overlong_penalties(np.array([9999]), OverlongConfig()).tolist() == [0.0]


def test_a_buffer_is_no_longer_than_the_length() -> None:
    with pytest.raises(ValueError, match=r"overlong\.buffer is 9, more than overlong\.length 8"):
        OverlongConfig(length=8, buffer=9)


def test_three_proximal_policies() -> None:
    pack = pack_of(version=1, step=4)
    logprobs = (pack.behaviour + 0.4).requires_grad_()
    assert torch.equal(proximal_logprobs("behaviour", pack, logprobs), pack.behaviour)
    # Three versions old of a policy that this step brings to four.
    torch.testing.assert_close(proximal_logprobs("interpolated", pack, logprobs), pack.behaviour + 0.3)
    fresh = proximal_logprobs("interpolated", pack_of(version=4, step=4), logprobs)
    torch.testing.assert_close(fresh, pack.behaviour)
    recomputed = proximal_logprobs("recomputed", pack, logprobs)
    assert torch.equal(recomputed, logprobs)
    assert not recomputed.requires_grad


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("pow", [4 * 4 / 6, 4 * 1 / 6, 4 * 1 / 6, 0.0]),
        ("max_min", [2.0, 0.0, 0.0, 2.0]),
        ("max_random", [4 * 0.4 / 0.7, 4 / 7, 4 / 7, 4 / 7]),
    ],
)
def test_policy_filtration(mode: str, expected: list[float]) -> None:
    rewards = torch.tensor([2.0, 1.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    if mode == "max_min":
        rewards[3] = -3.0
    found = FILTERS.bind("pf_ppo", {"mode": mode})(rewards, torch.tensor([0, 0, 0, 0, 1, 1]))
    assert found[:4].tolist() == pytest.approx(expected, abs=1e-6)
    assert (found >= 0).all()
    assert found[4:].tolist() == [1.0, 1.0], "a group of equal rewards weighs as it did"


@pytest.mark.parametrize(("mode", "expected"), [("max_min", 1.0), ("max_random", 1.0)])
def test_policy_filtration_takes_rewards_that_differ_by_rounding_for_equal(mode: str, expected: float) -> None:
    rewards = torch.tensor([0.7 + 0.2 + 0.1, 1.0, 1.0], dtype=torch.float64)
    found = FILTERS.bind("pf_ppo", {"mode": mode})(rewards, torch.tensor([0, 0, 0]))
    assert found.tolist() == [expected] * 3


def test_the_value_loss_takes_the_worse_of_near_and_new() -> None:
    values, old, returns = (
        torch.tensor(row) for row in ([1.0, 1.0, -1.0, -1.0], [1.0, 0.5, 0.0, 0.0], [2.0, 2.0, 1.0, -1.0])
    )
    # Held to old ± 0.2: 1, 0.7, −0.2, −0.2; distances from the returns 1 | 1, 1 | 1.3, 2 | 1.2, 0 | 0.8.
    assert value_loss(values, old, returns, 0.2).tolist() == pytest.approx([0.5, 1.69 / 2, 2.0, 0.32])
