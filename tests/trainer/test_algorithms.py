"""Every algorithm in a real step: packed, split or one by one the same, masked tokens without gradient; critic,
reference policy, entropy, filters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from trainer_support import make_trajectory

from penstock.trainer import (
    Ranks,
    TrainingDiverged,
)
from penstock.trainer.advantages import ADVANTAGES, Advantages, needs_of
from penstock.trainer.losses import LOSSES
from penstock.transfer_queue import Trajectory

pytestmark = pytest.mark.torch
CRITICS = [name for name in ADVANTAGES.names() if "values" in needs_of(ADVANTAGES.get(name))]
SHARES = {"kl_cov": {"share": 0.1}, "clip_cov": {"share": 0.1, "lower": 0.01}}


class FreshStep(Step):
    def run(self, groups: list[list[Trajectory]], step: int = 1) -> dict[str, Any]:
        return self.train(self.batch_of(groups, step))


def trajectories(groups: int = 3) -> list[list[Trajectory]]:
    """Groups of unequal sizes; the first episode of each has two segments and turn rewards."""
    made = [[make_trajectory(f"train/{g}", m, 0) for m in range(3 + g)] for g in range(groups)]
    for group in made:
        first = group[0]
        segments = [*first.segments, *group[1].segments]
        group[0] = replace(first, segments=segments, num_turns=4, turn_rewards=(0.5, 0.0, 0.25, 0.0))
    return made


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_estimator_trains(name: str, tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, advantage=name, turn_reward_weight=0.5)
    before = step.weights()
    metrics = step.run(trajectories())
    assert metrics["updates"] == 1
    assert metrics["advantage_abs"] > 0
    assert not torch.equal(step.weights(), before)


@pytest.mark.parametrize("aggregation", ["episode_mean", "constant"])
@pytest.mark.parametrize("name", LOSSES.names())
def test_packed_split_and_one_by_one_are_the_same(name: str, aggregation: str, tiny_model: str, ranks: Ranks) -> None:
    results = []
    for budget in (1, 4096):
        step = FreshStep(
            tiny_model,
            ranks,
            loss=name,
            loss_options=SHARES.get(name, {}),
            aggregation=aggregation,
            aggregation_length=30,
            minibatches=2,
            micro_batch_tokens=budget,
            correction="truncated_is",
            correction_options={"level": "sequence"},
        )
        results.append((step.run(trajectories()), step.weights()))
    (one, one_weights), (packed, packed_weights) = results
    assert one["loss"] == pytest.approx(packed["loss"], abs=1e-5)
    assert one["grad_norm"] == pytest.approx(packed["grad_norm"], rel=1e-4)
    torch.testing.assert_close(one_weights, packed_weights, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", LOSSES.names())
def test_masked_tokens_carry_no_gradient(name: str, tiny_model: str, ranks: Ranks) -> None:
    """What the engine said of them changes nothing, however absurd."""
    weights = []
    for absurd in (-1.0, -300.0):
        groups = trajectories(2)
        segment = groups[0][1].segments[0]
        logprobs, spans = segment.response_logprobs.copy(), segment.version_spans.copy()
        logprobs[0] = absurd
        split = np.array([[0, 0, 1], [5, 1, spans[0, 2]], *[[5, *span[1:]] for span in spans[1:]]], dtype=np.int32)
        changed = replace(segment, response_logprobs=logprobs, version_spans=split)
        groups[0][1] = replace(groups[0][1], segments=[changed])
        step = FreshStep(
            tiny_model, ranks, loss=name, loss_options=SHARES.get(name, {}), advantage="reinforce_plus_plus"
        )
        fresh = [[_at_version(t, 5) if t is not groups[0][1] else t for t in group] for group in groups]
        metrics = step.run(fresh, step=6)
        assert metrics["tokens_masked"] == 1
        weights.append(step.weights())
    assert torch.equal(weights[0], weights[1])


def _at_version(trajectory: Trajectory, version: int) -> Trajectory:
    segments = []
    for segment in trajectory.segments:
        spans = segment.version_spans.copy()
        spans[:, 0] = version
        segments.append(replace(segment, version_spans=spans))
    return replace(trajectory, segments=segments)


@pytest.mark.parametrize("name", CRITICS)
def test_the_critic_learns_the_returns(name: str, tiny_model: str, ranks: Ranks) -> None:
    groups = [[replace(t, reward=1.0, turn_rewards=()) for t in group] for group in trajectories(1)]
    step = FreshStep(tiny_model, ranks, advantage=name, critic={"lr": 3e-3, "warmup_steps": 100, "clip": 10.0})
    before = step.weights()
    losses = [step.run(groups)["value_loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(0.5), "values begin at 0, returns are 1"
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(step.weights(), before), "while the critic warms up the policy stays"


def test_after_the_warm_up_the_policy_learns_too(tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, advantage="gae", critic={"warmup_steps": 1})
    before = step.weights()
    assert step.run(trajectories(1), step=0)["updates"] == 0
    assert torch.equal(step.weights(), before)
    assert step.run(trajectories(1), step=1)["updates"] == 1
    assert not torch.equal(step.weights(), before)


def test_the_reference_is_the_model_before_training(tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, kl={"in_loss": 0.1, "estimator": "k3"})
    found = [step.run(trajectories(1))["kl_reference"] for _ in range(3)]
    assert found[0] == pytest.approx(0.0, abs=1e-7)
    assert min(found[1:]) > 1e-5


def test_kl_in_the_reward_is_a_reward_of_tokens(tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, advantage="reinforce_plus_plus", kl={"in_reward": 0.2, "estimator": "k1"})
    groups = trajectories(1)
    step.run(groups)
    batch = step.batch_of(groups)
    scored = step.learner.score(batch)
    expected = torch.cat([pack.proximal - pack.reference for packs in scored.minibatches for pack in packs])
    token = torch.cat([pack.token for packs in scored.minibatches for pack in packs])
    assert scored.tokens.kl_rewards is not None
    torch.testing.assert_close(scored.tokens.kl_rewards[token], -0.2 * expected)
    assert expected.abs().max() > 1e-4
    assert scored.kl == pytest.approx(float(expected.sum()) / len(batch.trajectories), rel=1e-4)


def test_the_coefficient_of_kl_follows_its_target(tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, kl={"in_reward": 0.2, "estimator": "k3", "target": 1e-9, "horizon": 100})
    step.run(trajectories(1))
    held = step.engine.kl_coefficient
    step.run(trajectories(1))
    assert held == pytest.approx(0.2 * (1 - 0.2 * 3 / 100), rel=1e-3), "no KL yet: down"
    assert step.engine.kl_coefficient > held, "far above the target: up"


def test_a_filtered_episode_carries_no_gradient(tiny_model: str, ranks: Ranks) -> None:
    """max_min keeps the best and the worst; what lies between does not train."""
    weights = []
    for flipped in (False, True):
        groups = [[make_trajectory("train/0", m, 0) for m in range(3)]]
        groups[0] = [replace(t, reward=r) for t, r in zip(groups[0], (0.0, 0.5, 1.0), strict=True)]
        if flipped:
            segment = groups[0][1].segments[0]
            other = replace(segment, response_ids=segment.response_ids[::-1].copy())
            groups[0][1] = replace(groups[0][1], segments=[other])
        step = FreshStep(tiny_model, ranks, advantage="rloo", filter="pf_ppo", filter_options={"mode": "max_min"})
        batch = step.batch_of(groups)
        scored = step.learner.score(batch)
        tokens = torch.cat([torch.full((len(row.targets),), 1.0 + row.episode) for row in batch.rows]).double()
        step.learner.update(batch, scored, Advantages(tokens))
        weights.append(step.weights())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)


def test_a_critic_that_breaks_stops_the_run(tiny_model: str, ranks: Ranks) -> None:
    step = FreshStep(tiny_model, ranks, advantage="gae", max_bad_steps=1, critic={"warmup_steps": 10})
    with torch.no_grad():
        next(iter(step.engine.critic.module.parameters())).fill_(float("nan"))
    step.run(trajectories(1))
    with pytest.raises(TrainingDiverged, match="gradient norm nan; 2 steps in a row"):
        step.run(trajectories(1))
