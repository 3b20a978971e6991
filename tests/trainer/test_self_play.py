"""PRIME, SPPO and SPIN in a step, also where the segments of an episode are in several packs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from trainer_support import make_trajectory

from penstock.trainer import (
    Ranks,
    pack_rows,
)

pytestmark = pytest.mark.torch


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
