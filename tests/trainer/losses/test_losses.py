"""Policy losses by hand, value and gradient, and what holds for all of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trainer_support import loss_by_hand

from penstock.trainer.advantages import needs_of
from penstock.trainer.loss import covariances
from penstock.trainer.losses import LOSSES, LossInput, Sequences

drawn, largest = (getattr(LOSSES.get(name), "choose") for name in ("clip_cov", "kl_cov"))  # noqa: B009
drawn = partial(drawn, lower=1.0, upper=5.0)

pytestmark = pytest.mark.torch
OF_TOKENS = [name for name in LOSSES.names() if "sequences" not in needs_of(LOSSES.get(name))]
LOG2, GATES = math.log(2), [4 / (1 + math.exp(-0.5)), 4 / 1.05 / (1 + math.exp(-0.525))]
SEGMENTS = {"segment": [0, 0, 1, 1], "options": {"clip_low": 0.1, "clip_high": 0.1}}
KL_COV = {"chosen": [True, False], "options": {"kl_weight": 0.5}}
BY_HAND: list[tuple[str, list[float], list[float], dict[str, Any], list[float], list[float] | None]] = [
    # min(ρA, clip(ρ)A): 2; 1.28·2; 1.5·−2; 0.5·2; 0.8·−2 — each times −w. No gradient where a clip binds.
    (
        *("decoupled_ppo", [1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]),
        *({"weights": [1.0, 0.5, 1.0, 1.0, 2.0]}, [-2.0, -1.28, 3.0, -1.0, 3.2], [-2.0, 0.0, 3.0, -1.0, 0.0]),
    ),
    # clip at 1.2; −ρA = 2; 4 is more than dual clip's 3; clip at 0.8
    ("ppo", [1.5, 2.0, 4.0, 0.5], [1.0, -1.0, -1.0, -1.0], {}, [-1.2, 2.0, 3.0, 0.8], [0.0, 2.0, 0.0, 0.0]),
    ("ppo", [1.5], [1.0], {"options": {"clip_high": 0.28}}, [-1.28], [0.0]),
    # Segment 0: √(1.5 · 1.5) = 1.5, clipped at 1.1. Segment 1: √(2 · 0.5) = 1, though its tokens are far off.
    ("gspo", [1.5, 1.5, 2.0, 0.5], [1.0] * 4, SEGMENTS, [-1.1, -1.1, -1.0, -1.0], [0.0, 0.0, -1.0, -1.0]),
    # The gradient stays where the weight is clipped.
    ("cispo", [2.0, 0.5], [1.0, -1.0], {}, [-1.28 * (-2 + LOG2), 0.5 * (-2 - LOG2)], [-1.28, 0.5]),
    ("sapo", [1.0, 1.5, 1.5], [2.0, 1.0, -1.0], {}, [-4.0, -GATES[0], GATES[1]], None),
    ("reinforce", [1.0, 3.0], [1.0, -0.5], {"weights": [1.0, 2.0]}, [2.0, -2 + math.log(3)], [-1.0, 1.0]),
    ("kl_cov", [1.5, 1.5], [1.0, 1.0], KL_COV, [-1.5 + 0.5 * math.log(1.5), -1.5], [-1.5 + 0.5, -1.5]),
    ("clip_cov", [1.1, 1.1], [1.0, 1.0], {"chosen": [True, False]}, [0.0, -1.1], [0.0, -1.1]),
    # Logarithms of ratios are held; with a negative advantage nothing else clips them.
    ("decoupled_ppo", [math.exp(25)], [-1.0], {}, [math.exp(20)], None),
    ("decoupled_ppo", [math.exp(-25)], [1.0], {}, [-math.exp(-20)], None),
    ("gspo", [math.exp(25)], [-1.0], {}, [math.exp(10)], None),
]


def gradient(result: Any, logprobs: Any) -> list[float]:
    result.per_token.sum().backward()
    return logprobs.grad.tolist()


@pytest.mark.parametrize(("name", "ratios", "advantages", "more", "values", "slopes"), BY_HAND)
def test_loss_by_hand(
    name: str, ratios: list[float], advantages: list[float], more: Any, values: list[float], slopes: list[float] | None
) -> None:
    result, logprobs = loss_by_hand(name, ratios, advantages, **more)
    assert result.per_token.tolist() == pytest.approx(values)
    assert slopes is None or gradient(result, logprobs) == pytest.approx(slopes)


CLIPS = {"clip_fraction_low": [False, False, False, True], "clip_fraction_high": [True, False, False, False]}
CHOICE = {"chosen_fraction": [False, True, False, False]}
METRICS: dict[str, dict[str, list[bool]]] = {
    "decoupled_ppo": CLIPS,
    "clip_cov": CLIPS | CHOICE,
    "cispo": {"clip_fraction_low": [False] * 4, "clip_fraction_high": [True, True, False, False]},
    "kl_cov": CHOICE,
    "ppo": CLIPS | {"dual_clip_fraction": [False] * 4},
    # The geometric mean of the segment is 0.87, below both bounds.
    "gspo": {"clip_fraction_low": [False, True, False, True], "clip_fraction_high": [False] * 4},
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_say_where_a_loss_does_something_else(name: str) -> None:
    """By the ratio and the sign of the advantage, however small that is."""
    result, _ = loss_by_hand(name, [1.5, 1.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5], chosen=CHOICE["chosen_fraction"])
    assert {metric: found.tolist() for metric, found in result.metrics.items()} == METRICS[name]


def test_dual_clip_is_measured() -> None:
    result, _ = loss_by_hand("ppo", [2.0, 4.0], [-1.0, -1.0])
    assert result.metrics["dual_clip_fraction"].tolist() == [False, True]


def test_covariance_of_a_token_is_the_product_of_its_distances_from_the_means() -> None:
    found = covariances(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-1.0, -4.0, -1.0]))
    assert found.tolist() == [-2.0, 2.0, 3.0]


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
    advantages = [0.7, -0.3, 1.5]
    result, logprobs = loss_by_hand(name, [1.0] * 3, advantages)
    assert gradient(result, logprobs) == pytest.approx([-a for a in advantages])


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_order_of_segments_does_not_matter_and_no_token_is_no_loss(name: str) -> None:
    ratios, advantages, segment = [0.7, 1.1, 1.4, 0.9, 1.0], [1.0, -1.0, 0.5, 0.3, 0.2], [0, 0, 1, 1, 1]
    before, _ = loss_by_hand(name, ratios, advantages, segment=segment)
    order = [2, 3, 4, 0, 1]
    moved = [[values[i] for i in order] for values in (ratios, advantages)]
    after, _ = loss_by_hand(name, *moved, segment=[0, 0, 0, 1, 1])
    torch.testing.assert_close(after.per_token, before.per_token[order])
    assert loss_by_hand(name, [], [])[0].per_token.shape == (0,)


def sequences(ratio: list[float], rival: list[float], side: list[int], advantages: list[float]) -> LossInput:
    """Episodes of two tokens each."""
    logprobs = torch.randn(2 * len(ratio)).requires_grad_()
    twice = [torch.tensor(v, dtype=torch.float32).repeat_interleave(2) for v in (ratio, rival, side, advantages)]
    zeros, ones = torch.zeros(len(logprobs)), torch.ones(len(logprobs))
    by_token = Sequences(twice[0], ones * 2, twice[1], twice[2])
    return LossInput(logprobs, zeros, zeros, twice[3], ones, zeros.long(), None, by_token)


def test_the_loss_of_sppo_by_hand() -> None:
    batch = sequences([0.3, -0.2], [0, 0], [0, 0], [0.5, -0.25])
    found = LOSSES.bind("sppo", {"eta": 2.0})(batch)
    torch.testing.assert_close(found.metrics["sequence_ratio"], torch.tensor([0.3, 0.3, -0.2, -0.2]))
    assert found.per_token.sum().item() == pytest.approx((0.3 - 1.0) ** 2 + (-0.2 + 0.5) ** 2, rel=1e-5)
    assert gradient(found, batch.logprobs) == pytest.approx([2 * (0.3 - 1)] * 2 + [2 * (-0.2 + 0.5)] * 2, rel=1e-5)


def test_the_loss_of_spin_by_hand() -> None:
    batch = sequences([0.4, -0.6, 5.0], [-0.6, 0.4, 0.0], [1, -1, 0], [0.0, 0.0, 0.0])
    found = LOSSES.bind("spin", {"lam": 0.5})(batch)
    margin = torch.tensor(0.5 * (0.4 + 0.6))
    assert found.metrics["paired_fraction"].tolist() == [True] * 4 + [False] * 2
    torch.testing.assert_close(found.metrics["spin_margin"], torch.tensor([0.5] * 4 + [0.0] * 2))
    assert found.per_token.sum().item() == pytest.approx(-torch.sigmoid(margin).log().item(), rel=1e-5)
    slope = 0.5 * torch.sigmoid(-margin).item()
    assert gradient(found, batch.logprobs) == pytest.approx([-slope, -slope, slope, slope, 0, 0], rel=1e-5)
