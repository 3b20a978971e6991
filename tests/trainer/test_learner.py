"""One step: the gradient by hand, invariance to the split, mismatch and other metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from trainer_support import continued, make_trajectory

from penstock.trainer import Ranks, TrainerConfig, pack_rows
from penstock.trainer.advantages import Advantages
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective, Targets
from penstock.trainer.metrics import MetricAccumulator
from penstock.trainer.packing import join_rows, split_by_budget
from penstock.transfer_queue import Trajectory

pytestmark = pytest.mark.torch


def trajectories(groups: int = 4, members: int = 4, version: int = 0) -> list[list[Trajectory]]:
    return [[make_trajectory(f"train/{g}", m, version) for m in range(members)] for g in range(groups)]


def run(step: Step, groups: list[list[Trajectory]]) -> dict[str, Any]:
    return step.train(step.batch_of(groups))


def test_the_loss_is_bit_identical_however_tokens_are_split(tiny_model: str, ranks: Ranks) -> None:
    batch = Step(tiny_model, ranks).batch_of(trajectories())
    by_episode = torch.linspace(-2, 2, len(batch.trajectories))
    tokens = torch.cat([by_episode[row.episode].expand(len(row.targets)) for row in batch.rows])
    targets = Targets(tokens, torch.ones(len(by_episode), dtype=torch.float64))
    logprobs = [torch.randn(len(row.targets)) - 3 for row in batch.rows]
    losses = []
    for budget in (1, 60, 100000):
        tally = MetricAccumulator()
        objective = Objective(TrainerConfig(), targets, tally)
        for chosen in split_by_budget([len(row.ids) for row in batch.rows], budget):
            outputs = Outputs(torch.cat([logprobs[index] for index in chosen]), None)
            objective(join_rows([batch.rows[index] for index in chosen]), outputs)
        losses.append(tally.reduce(ranks).mean("loss"))
    assert losses[0] == losses[1] == losses[2]


def test_the_step_does_not_depend_on_whether_rows_share_their_prefixes(tiny_model: str, ranks: Ranks) -> None:
    """Neither a group's prompt nor the history that an episode's segments repeat."""
    groups, results = [], []
    for group in trajectories():
        prompt = np.tile(group[0].segments[0].prompt_ids, 3)
        groups.append([continued(one, prompt) for one in group])
    for share in (True, False):
        step = Step(tiny_model, ranks)
        step.engine.policy.unshared_because = "" if share else "rows are apart"
        results.append((run(step, groups), step.weights()))
    (shared, weights), (apart, expected) = results
    assert apart["prefix_tokens_saved"] == 0
    assert shared["prefix_tokens_saved"] > shared["tokens"] / 4
    assert shared["tokens_squared"] < apart["tokens_squared"]
    assert all(shared[name] == apart[name] for name in ("tokens", "tokens_sampled", "tokens_trained", "segments"))
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-6)
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)


def test_the_gradient_is_the_hand_written_one_and_is_followed_downhill(tiny_model: str, ranks: Ranks) -> None:
    """At one minibatch ρ = 1: the gradient is −mean over tokens of w · A · ∇logπ."""
    step = Step(tiny_model, ranks)
    batch = step.batch_of(trajectories())
    scored = step.learner.score(batch)
    advantages = step.learner.advantages(batch, scored)
    (pack,) = pack_rows(batch.rows, 100000)
    logprobs = step.engine.policy(pack).logprobs
    weights = (logprobs - pack.behaviour).exp().clamp(max=2.0).detach()
    expected = -(weights * advantages.tokens.float()[pack.token] * logprobs).sum() / len(logprobs)
    grads = torch.autograd.grad(expected, list(step.engine.policy.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    metrics = step.learner.update(batch, scored, advantages)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    (after,) = step.engine.score([pack])
    assert ((after - logprobs.detach()) * advantages.tokens.float()[pack.token]).mean() > 0.01


def test_an_episode_weighs_the_same_in_one_segment_and_in_two(tiny_model: str, ranks: Ranks) -> None:
    (groups,) = trajectories(groups=1, members=2)
    joined = replace(groups[0], segments=[*groups[0].segments, *groups[1].segments])
    results = []
    for group in (groups, [joined, replace(groups[1], segments=[])]):
        step = Step(tiny_model, ranks)
        batch = step.batch_of([group])
        same = Advantages(torch.full((sum(len(row.targets) for row in batch.rows),), 0.5, dtype=torch.float64))
        results.append(step.learner.update(batch, step.learner.score(batch), same))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-9)
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-6)


def test_a_filter_multiplies_the_weights_of_episode_mean(tiny_model: str, ranks: Ranks) -> None:
    step = Step(tiny_model, ranks, aggregation="episode_mean", filter="pf_ppo", filter_options={"mode": "max_min"})
    (group,) = trajectories(groups=1, members=3)
    batch = step.batch_of([[replace(one, reward=reward) for one, reward in zip(group, (0.0, 0.5, 1.0), strict=True)]])
    with patch("penstock.trainer.learner.Targets", wraps=Targets) as targets:
        step.train(batch)
    tokens = [sum(int(row.mask.sum()) for row in batch.rows if row.episode == episode) for episode in range(3)]
    expected = [1.5 / tokens[0], 0.0, 1.5 / tokens[2]]
    assert targets.call_args.args[1].tolist() == pytest.approx(expected, abs=1e-6)


def test_minibatches_clip_against_the_policy_at_the_start_of_the_step(tiny_model: str, ranks: Ranks) -> None:
    metrics = run(Step(tiny_model, ranks, minibatches=2, lr=0.1), trajectories())
    assert metrics["updates"] == 2
    assert metrics["clip_fraction_high"] + metrics["clip_fraction_low"] > 0.05
    single = run(Step(tiny_model, ranks), trajectories())
    assert single["clip_fraction_high"] == single["clip_fraction_low"] == 0
    assert single["logprob_abs_diff_all_mean"] == pytest.approx(metrics["logprob_abs_diff_all_mean"], abs=1e-6)


def test_the_mismatch_is_zero_for_the_trainers_own_logprobs(tiny_model: str, ranks: Ranks) -> None:
    step = Step(tiny_model, ranks)
    batch = step.batch_of(trajectories(version=1))
    for index, row in enumerate(batch.rows):
        (own,) = step.engine.score(pack_rows([row], 1))
        batch.rows[index] = replace(row, behaviour=own.numpy())
    metrics = step.train(batch)
    assert metrics["logprob_abs_diff_max"] < 1e-5
    assert metrics["logprob_abs_diff_tokens"] == metrics["tokens_trained"]
    assert metrics["effective_sample_share"] == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["kl_k3"]) < 1e-9
    assert metrics["staleness_tokens"] == {"0": metrics["tokens_trained"]}


def test_metrics_of_the_batch(tiny_model: str, ranks: Ranks) -> None:
    groups = trajectories(groups=2)
    groups[1] = [replace(t, reward=1.0) for t in groups[1]]
    rewards = np.array([t.reward for group in groups for t in group])
    metrics = run(Step(tiny_model, ranks), groups)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(rewards.std())
    assert metrics["zero_variance_groups"] == metrics["staleness_max"] == 1
    assert metrics["episode/tool_calls"] == pytest.approx(2.5)
    assert metrics["outcome/completed"] == 8
    assert metrics["tokens_trained"] == metrics["tokens_sampled"] == sum(t.num_sampled for g in groups for t in g)
    assert metrics["staleness_tokens"] == {"1": metrics["tokens_trained"]}
