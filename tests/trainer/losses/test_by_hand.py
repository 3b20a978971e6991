"""Every policy loss by hand, value and gradient."""

from __future__ import annotations

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from trainer_support import loss_by_hand

from penstock.trainer.advantages import needs_of
from penstock.trainer.loss import covariances
from penstock.trainer.losses import LOSSES

drawn, largest = (getattr(LOSSES.get(name), "choose") for name in ("clip_cov", "kl_cov"))  # noqa: B009
drawn = partial(drawn, lower=1.0, upper=5.0)

pytestmark = pytest.mark.torch
OF_TOKENS = [name for name in LOSSES.names() if "sequences" not in needs_of(LOSSES.get(name))]
"""Losses of tokens; test_self_play.py has those of whole episodes."""


def gradient(result, logprobs) -> list[float]:
    result.per_token.sum().backward()
    return logprobs.grad.tolist()


def test_ppo_with_dual_clip() -> None:
    result, logprobs = loss_by_hand("ppo", [1.5, 2.0, 4.0, 0.5], [1.0, -1.0, -1.0, -1.0])
    # clip at 1.2; −ρA = 2; 4 is more than dual clip's 3; clip at 0.8
    assert result.per_token.tolist() == pytest.approx([-1.2, 2.0, 3.0, 0.8])
    assert result.metrics["dual_clip_fraction"].tolist() == [False, False, True, False]
    assert gradient(result, logprobs) == pytest.approx([0.0, 2.0, 0.0, 0.0])


def test_clip_higher() -> None:
    result, _ = loss_by_hand("ppo", [1.5], [1.0], options={"clip_high": 0.28})
    assert result.per_token.tolist() == pytest.approx([-1.28])


def test_gspo_clips_the_geometric_mean_of_a_segment() -> None:
    # Segment 0: √(1.5 · 1.5) = 1.5, clipped at 1.1. Segment 1: √(2 · 0.5) = 1, though its tokens are far off.
    options = {"clip_low": 0.1, "clip_high": 0.1}
    result, logprobs = loss_by_hand("gspo", [1.5, 1.5, 2.0, 0.5], [1.0] * 4, segment=[0, 0, 1, 1], options=options)
    assert result.per_token.tolist() == pytest.approx([-1.1, -1.1, -1.0, -1.0])
    assert gradient(result, logprobs) == pytest.approx([0.0, 0.0, -1.0, -1.0])


def test_cispo_keeps_the_gradient_where_the_weight_is_clipped() -> None:
    result, logprobs = loss_by_hand("cispo", [2.0, 0.5], [1.0, -1.0])
    assert result.per_token.tolist() == pytest.approx([-1.28 * (-2 + math.log(2)), 0.5 * (-2 - math.log(2))])
    assert gradient(result, logprobs) == pytest.approx([-1.28, 0.5])


METRICS: dict[str, dict[str, list[bool]]] = {
    "decoupled_ppo": {
        "clip_fraction_low": [False, False, False, True],
        "clip_fraction_high": [True, False, False, False],
    },
    "clip_cov": {
        "clip_fraction_low": [False, False, False, True],
        "clip_fraction_high": [True, False, False, False],
        "chosen_fraction": [False, True, False, False],
    },
    "cispo": {"clip_fraction_low": [False] * 4, "clip_fraction_high": [True, True, False, False]},
    "kl_cov": {"chosen_fraction": [False, True, False, False]},
    "ppo": {
        "clip_fraction_low": [False, False, False, True],
        "clip_fraction_high": [True, False, False, False],
        "dual_clip_fraction": [False] * 4,
    },
    # The geometric mean of the segment is 0.87, below both bounds.
    "gspo": {"clip_fraction_low": [False, True, False, True], "clip_fraction_high": [False] * 4},
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_say_where_a_loss_does_something_else(name: str) -> None:
    """By the ratio and the sign of the advantage, however small that is."""
    advantages = [0.5, -0.5, 0.5, -0.5]
    result, _ = loss_by_hand(name, [1.5, 1.5, 0.5, 0.5], advantages, chosen=[False, True, False, False])
    assert {metric: found.tolist() for metric, found in result.metrics.items()} == METRICS[name]


def test_sapo() -> None:
    result, logprobs = loss_by_hand("sapo", [1.0, 1.5, 1.5], [2.0, 1.0, -1.0])
    gates = [2.0, 4 / (1 + math.exp(-0.5)), 4 / 1.05 / (1 + math.exp(-0.525))]
    assert result.per_token.tolist() == pytest.approx([-4.0, -gates[1], gates[2]])
    # At ρ = 1 the gate's slope is 1, so the gradient is the plain one: −A.
    assert gradient(result, logprobs)[0] == pytest.approx(-2.0)


def test_reinforce() -> None:
    result, logprobs = loss_by_hand("reinforce", [1.0, 3.0], [1.0, -0.5], weights=[1.0, 2.0])
    assert result.per_token.tolist() == pytest.approx([2.0, 2 * 0.5 * (-2 + math.log(3))])
    assert gradient(result, logprobs) == pytest.approx([-1.0, 1.0])


def test_covariance_of_a_token_is_the_product_of_its_distances_from_the_means() -> None:
    found = covariances(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-1.0, -4.0, -1.0]))
    assert found.tolist() == [-2.0, 2.0, 3.0]


def test_kl_cov_holds_the_chosen_tokens() -> None:
    result, logprobs = loss_by_hand("kl_cov", [1.5, 1.5], [1.0, 1.0], chosen=[True, False], options={"kl_weight": 0.5})
    assert result.per_token.tolist() == pytest.approx([-1.5 + 0.5 * math.log(1.5), -1.5])
    assert gradient(result, logprobs) == pytest.approx([-1.5 + 0.5, -1.5])


def test_clip_cov_drops_the_chosen_tokens() -> None:
    result, logprobs = loss_by_hand("clip_cov", [1.1, 1.1], [1.0, 1.0], chosen=[True, False])
    assert result.per_token.tolist() == pytest.approx([0.0, -1.1])
    assert gradient(result, logprobs) == pytest.approx([0.0, -1.1])


def test_what_is_chosen() -> None:
    covariance = torch.tensor([0.5, 3.0, 2.0, 9.0])
    seed = torch.Generator().manual_seed(0)
    assert largest(covariance, seed, share=0.5).tolist() == [False, True, False, True]
    assert largest(covariance, seed, share=0.01).tolist() == [False, False, False, True], "one at least"
    assert drawn(covariance, seed, share=1.0).tolist() == [False, True, True, False]
    assert int(drawn(covariance, seed, share=0.25).sum()) == 1
    assert drawn(torch.zeros(3), seed, share=1.0).tolist() == [False] * 3
    assert drawn(torch.tensor([1.0, 5.0, 3.0]), seed, share=1.0).tolist() == [False, False, True], "between the bounds"


@pytest.mark.parametrize("name", OF_TOKENS)
def test_weights_scale_the_loss_and_its_gradient(name: str) -> None:
    ratios, advantages = [0.7, 1.1, 1.4, 0.9], [1.0, -1.0, 0.5, 0.3]
    once, first = loss_by_hand(name, ratios, advantages)
    twice, second = loss_by_hand(name, ratios, advantages, weights=[2.0] * 4)
    torch.testing.assert_close(twice.per_token, 2 * once.per_token)
    assert gradient(twice, second) == pytest.approx([2 * g for g in gradient(once, first)])


@pytest.mark.parametrize("name", [name for name in OF_TOKENS if name != "clip_cov"])
def test_at_the_proximal_policy_every_gradient_is_the_plain_one(name: str) -> None:
    """Where no step has been made yet there is nothing to clip: ∂L/∂logπ = −A."""
    advantages = [0.7, -0.3, 1.5]
    result, logprobs = loss_by_hand(name, [1.0] * 3, advantages)
    assert gradient(result, logprobs) == pytest.approx([-a for a in advantages])


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_order_of_segments_does_not_matter(name: str) -> None:
    ratios, advantages, segment = [0.7, 1.1, 1.4, 0.9, 1.0], [1.0, -1.0, 0.5, 0.3, 0.2], [0, 0, 1, 1, 1]
    before, _ = loss_by_hand(name, ratios, advantages, segment=segment)
    order = [2, 3, 4, 0, 1]
    moved = [[values[i] for i in order] for values in (ratios, advantages)]
    after, _ = loss_by_hand(name, *moved, segment=[0, 0, 0, 1, 1])
    torch.testing.assert_close(after.per_token, before.per_token[order])


@pytest.mark.parametrize("name", OF_TOKENS)
def test_no_token_is_no_loss(name: str) -> None:
    result, _ = loss_by_hand(name, [], [])
    assert result.per_token.shape == (0,)


@pytest.mark.parametrize(("name", "most"), [("decoupled_ppo", 20), ("gspo", 10)])
def test_a_ratio_far_away_is_held(name: str, most: int) -> None:
    """Of its logarithm; with a negative advantage nothing else clips it."""
    result, _ = loss_by_hand(name, [math.exp(25)], [-1.0])
    assert result.per_token.tolist() == pytest.approx([math.exp(most)])
    result, _ = loss_by_hand("decoupled_ppo", [math.exp(-25)], [1.0])
    assert result.per_token.tolist() == pytest.approx([-math.exp(-20)])
