"""PRIME, SPPO and SPIN: advantages and losses against hand computations, also where an episode's segments are split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from trainer_support import episodes, make_trajectory

from penstock.trainer import (
    BadBatch,
    BadJob,
    Ranks,
    TrainerConfig,
    check_algorithm,
    pack_rows,
)
from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.advantages.prime import outcome_loss
from penstock.trainer.grouping import best_and_worst
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective, Targets
from penstock.trainer.losses import LOSSES, LossInput, Sequences
from penstock.trainer.metrics import MetricAccumulator

pytestmark = pytest.mark.torch
prime, sppo = ADVANTAGES.get("prime"), ADVANTAGES.get("sppo")
sppo_loss, spin = LOSSES.get("sppo"), LOSSES.get("spin")


def test_prime_by_hand() -> None:
    """r̄ of the three: 0.2, −0.1, 0.4. Returns 1, 0, 0. The fourth is alone in its group."""
    process = [0.1, 0.3, -0.1, 0.4, 0.4, 9.0]
    found = prime(episodes([1, 0, 0, 1], [0, 0, 0, 1], [[2], [1], [2], [1]], process_rewards=process)).tokens
    first = [(0.1 - 0.15) + (0.3 - 0.15) + 1.0, (0.3 - 0.15) + 1.0]
    second = [(-0.1 - 0.3) - 0.5]
    third = [2 * (0.4 - 0.05) - 0.5, (0.4 - 0.05) - 0.5]
    torch.testing.assert_close(found, torch.tensor([*first, *second, *third, 0.0], dtype=torch.float64))


def test_prime_discounts() -> None:
    process = [0.1, 0.3, -0.1]
    found = prime(episodes([0, 0], [0, 0], [[2], [1]], process_rewards=process), gamma=0.5).tokens
    assert found.tolist() == pytest.approx([(0.1 + 0.1) + 0.5 * (0.3 + 0.1), 0.3 + 0.1, -0.1 - 0.2])


def test_the_outcome_loss_by_hand() -> None:
    found = outcome_loss(torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.0]), torch.tensor([1.0, 0.25]))
    first = -torch.sigmoid(torch.tensor(2.0)).log()
    second = -(0.25 * torch.sigmoid(torch.tensor(-1.0)).log() + 0.75 * torch.sigmoid(torch.tensor(1.0)).log())
    torch.testing.assert_close(found, torch.stack([first, second]))


def test_sppo_is_the_win_rate_over_one_half() -> None:
    found = sppo(episodes([1.0, 0.0, 0.0, 7.0], [0, 0, 0, 1], [[1], [2], [1], [1]])).tokens
    assert found.tolist() == pytest.approx([0.5, -0.25, -0.25, -0.25, 0.0])


def test_sppo_of_two_is_one_half_each_way() -> None:
    found = sppo(episodes([1.0, 0.0, 2.0, 2.0], [0, 0, 1, 1], [[1], [1], [1], [1]])).tokens
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_best_and_worst_are_partners() -> None:
    """The first of equals; not those that are not eligible, nor a group of equals, nor one without a member."""
    values = torch.tensor([9.0, 1.0, 3.0, 3.0, 1.0, 5.0, 5.0, 7.0])
    group = torch.tensor([4, 4, 4, 4, 4, 6, 6, 8])
    eligible = torch.tensor([False, *[True] * 6, False])
    partner, side = best_and_worst(values, group, eligible)
    assert partner.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert side.tolist() == [0, -1, 1, 0, 0, 0, 0, 0]


def given(ratio: list[float], rival: list[float], side: list[int], advantages: list[float]) -> LossInput:
    """Episodes of two tokens each."""
    logprobs = torch.randn(2 * len(ratio)).requires_grad_()
    twice = [torch.tensor(v, dtype=torch.float32).repeat_interleave(2) for v in (ratio, rival, side, advantages)]
    zeros, ones = torch.zeros(len(logprobs)), torch.ones(len(logprobs))
    sequences = Sequences(twice[0], ones * 2, twice[1], twice[2])
    return LossInput(logprobs, zeros, zeros, twice[3], ones, zeros.long(), None, sequences)


def test_the_loss_of_sppo_by_hand() -> None:
    batch = given([0.3, -0.2], [0, 0], [0, 0], [0.5, -0.25])
    found = sppo_loss(batch, eta=2.0)
    loss = found.per_token
    torch.testing.assert_close(found.metrics["sequence_ratio"], torch.tensor([0.3, 0.3, -0.2, -0.2]))
    assert loss.sum().item() == pytest.approx((0.3 - 1.0) ** 2 + (-0.2 + 0.5) ** 2, rel=1e-5)
    (slopes,) = torch.autograd.grad(loss.sum(), batch.logprobs)
    assert slopes.tolist() == pytest.approx([2 * (0.3 - 1.0)] * 2 + [2 * (-0.2 + 0.5)] * 2, rel=1e-5)


def test_the_loss_of_spin_by_hand() -> None:
    batch = given([0.4, -0.6, 5.0], [-0.6, 0.4, 0.0], [1, -1, 0], [0.0, 0.0, 0.0])
    found = spin(batch, lam=0.5)
    loss, margin = found.per_token, torch.tensor(0.5 * (0.4 + 0.6))
    assert found.metrics["paired_fraction"].tolist() == [True] * 4 + [False] * 2
    torch.testing.assert_close(found.metrics["spin_margin"], torch.tensor([0.5] * 4 + [0.0] * 2))
    assert loss.sum().item() == pytest.approx(-torch.sigmoid(margin).log().item(), rel=1e-5)
    (slopes,) = torch.autograd.grad(loss.sum(), batch.logprobs)
    slope = 0.5 * torch.sigmoid(-margin).item()
    assert slopes.tolist() == pytest.approx([-slope, -slope, slope, slope, 0, 0], rel=1e-5)


class SplitStep(Step):
    """Two groups of three; the first episode of each has two segments, so that small packs split it."""

    def __init__(self, model: str, ranks: Ranks, **settings: Any) -> None:
        super().__init__(model, ranks, **{"correction": None, **settings})
        groups = [[make_trajectory(f"train/{g}", m, 1) for m in range(3)] for g in range(2)]
        for group in groups:
            group[0] = replace(group[0], segments=[*group[0].segments, *group[1].segments], num_turns=4)
            group[:] = [replace(t, reward=r) for t, r in zip(group, (0.5, 1.0, 0.0), strict=True)]
        self.batch = self.batch_of(groups)

    def run(self) -> dict[str, Any]:
        return self.train(self.batch)

    def sums(self, logprobs: Any, pack: Any) -> Any:
        """[N] → [E]"""
        return torch.zeros(6).index_add(0, pack.episode, logprobs)


@pytest.mark.parametrize("budget", [1, 100000])
@pytest.mark.parametrize("loss", ["sppo", "spin"])
def test_the_gradient_over_packs_is_that_of_whole_episodes(
    loss: str, budget: int, tiny_model: str, ranks: Ranks
) -> None:
    """Also away from ratio 0: the proximal policy is the engine's."""
    settings: dict[str, Any] = {"proximal": "behaviour", "aggregation": "episode_sum", "advantage": "sppo"}
    step = SplitStep(tiny_model, ranks, loss=loss, micro_batch_tokens=budget, **settings)
    (pack,) = pack_rows(step.batch.rows, 100000)
    ratio = step.sums(step.engine.policy(pack).logprobs - pack.behaviour, pack)
    if loss == "sppo":
        expected = (ratio - torch.tensor([0.0, 0.5, -0.5] * 2)).square().sum() / 6
    else:
        margins = 0.1 * torch.stack([ratio[1] - ratio[2], ratio[4] - ratio[5]])
        expected = -torch.sigmoid(margins).log().sum() / 6
    gradients = torch.autograd.grad(expected, list(step.engine.policy.parameters()))
    norm = float(torch.sqrt(sum(one.square().sum() for one in gradients)))
    metrics = step.run()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = len(pack.token)
    assert metrics["loss"] * tokens / 6 == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.parametrize("budget", [1, 100000])
def test_the_implicit_reward_model_learns_outcomes(budget: int, tiny_model: str, ranks: Ranks) -> None:
    step = SplitStep(tiny_model, ranks, advantage="prime", micro_batch_tokens=budget, critic={"lr": 3e-3})
    first = step.run()
    assert first["value_process_reward"] == pytest.approx(0.0, abs=1e-6), "it begins as the reference"
    assert first["value_loss"] == pytest.approx(0.6931, abs=1e-3)
    scored = step.learner.score(step.batch)
    (pack,) = pack_rows(step.batch.rows, 100000)
    implicit = step.engine.critic.module(pack).detach()
    reference = step.engine.reference.module(pack).logprobs.detach()
    expected = torch.zeros(len(implicit)).index_copy(0, pack.token, 0.05 * (implicit - reference))
    torch.testing.assert_close(scored.tokens.process_rewards, expected, atol=1e-6, rtol=1e-4)
    sums = step.sums(0.05 * (implicit - reference), pack)
    by_hand = torch.nn.functional.binary_cross_entropy_with_logits(sums, torch.tensor([0.5, 1.0, 0.0] * 2))
    second = step.learner.update(step.batch, scored, step.learner.advantages(step.batch, scored))
    assert second["value_loss"] == pytest.approx(float(by_hand), rel=1e-4)
    losses = [second["value_loss"], *(step.run()["value_loss"] for _ in range(5))]
    assert losses[-1] < losses[0]


def test_prime_refuses_rewards_that_are_no_labels(tiny_model: str, ranks: Ranks) -> None:
    step = SplitStep(tiny_model, ranks, advantage="prime")
    bad = replace(step.batch.trajectories[2], reward=-1.0)
    step.batch = replace(step.batch, trajectories=[*step.batch.trajectories[:2], bad, *step.batch.trajectories[3:]])
    with pytest.raises(BadBatch, match=r"reward -1 is not from 0 to 1"):
        step.learner.advantages(step.batch, step.learner.score(step.batch))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sppo"}, r"set trainer\.aggregation=episode_sum"),
        ({"loss": "spin", "aggregation": "episode_mean"}, r"set trainer\.aggregation=episode_sum"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadJob, match=message):
        check_algorithm(TrainerConfig(**settings), group_size=4)


def test_spin_needs_a_pair() -> None:
    config = TrainerConfig(loss="spin", aggregation="episode_sum", advantage="gae")
    with pytest.raises(BadJob, match="group_size to 2"):
        check_algorithm(config, group_size=1)


def test_the_objective_takes_sequences_by_episode(tiny_model: str, ranks: Ranks) -> None:
    step = SplitStep(tiny_model, ranks, loss="sppo", aggregation="episode_sum")
    (pack,) = pack_rows(step.batch.rows, 100000)
    counts = torch.bincount(pack.episode, minlength=6).float()
    sequences = torch.stack([torch.full((6,), 0.5), counts, torch.zeros(6), torch.zeros(6)], dim=1)
    targets = Targets(torch.zeros(len(pack.token)), torch.ones(6, dtype=torch.float64), None, sequences)
    outputs = Outputs(torch.full((len(pack.token),), -2.0, requires_grad=True), None)
    found = Objective(step.config, targets, MetricAccumulator())(pack, outputs)
    assert found.item() == pytest.approx(6 * 0.25, rel=1e-5)
