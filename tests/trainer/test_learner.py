"""One step: the gradient by hand, invariance to the split, masked tokens, bad gradients, mismatch metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer_support import make_trajectory

from penstock.trainer import Learner, Ranks, StepBatch, TrainerConfig, TrainingDiverged, make_step_batch, pack_rows
from penstock.trainer.advantages import Advantages
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective, Targets
from penstock.trainer.metrics import MetricAccumulator
from penstock.trainer.packing import join_rows, split_by_budget
from penstock.transfer_queue import Batch, Trajectory

pytestmark = pytest.mark.torch
CONFIG = {"lr": 1e-2, "eps": 1e-4, "max_grad_norm": 1e9}


def learner(model: str, ranks: Ranks, **settings: Any) -> tuple[Learner, FSDPEngine]:
    config = TrainerConfig(**(CONFIG | settings))
    engine = FSDPEngine(model, config, ranks)
    return Learner(config, engine, ranks), engine


def trajectories(groups: int = 4, members: int = 4, version: int = 0) -> list[list[Trajectory]]:
    return [[make_trajectory(f"train/{g}", m, version) for m in range(members)] for g in range(groups)]


def batch_of(engine: FSDPEngine, groups: list[list[Trajectory]], step: int = 1, bound: int = 2) -> StepBatch:
    ids = Batch(step, [[t.episode_id for t in group] for group in groups])
    flat = [t for group in groups for t in group]
    return make_step_batch(ids, list(range(len(groups))), flat, bound, engine.limits)


def run(pair: tuple[Learner, FSDPEngine], groups: list[list[Trajectory]], **where: int) -> tuple[dict, torch.Tensor]:
    learn, engine = pair
    batch = batch_of(engine, groups, **where)
    scored = learn.score(batch)
    metrics = learn.update(batch, scored, learn.advantages(batch, scored))
    return metrics, torch.cat([tensor.flatten() for _, tensor in engine.weights(torch.float32)])


def targets_of(batch: StepBatch, by_episode: torch.Tensor) -> Targets:
    tokens = torch.cat([by_episode[row.episode].expand(len(row.targets)) for row in batch.rows])
    return Targets(tokens, torch.ones(len(by_episode), dtype=torch.float64))


def constant(batch: StepBatch) -> Advantages:
    return Advantages(torch.full((sum(len(row.targets) for row in batch.rows),), 0.5, dtype=torch.float64))


def test_the_loss_is_bit_identical_however_tokens_are_split(tiny_model: str, ranks: Ranks) -> None:
    _, engine = learner(tiny_model, ranks)
    batch = batch_of(engine, trajectories())
    targets = targets_of(batch, torch.linspace(-2, 2, len(batch.trajectories)))
    known = {row.targets.tobytes() + row.ids.tobytes(): torch.randn(len(row.targets)) - 3 for row in batch.rows}
    losses = []
    for budget in (1, 60, 100000):
        tally = MetricAccumulator()
        objective = Objective(TrainerConfig(), targets, tally)
        for chosen in split_by_budget([len(row.ids) for row in batch.rows], budget):
            rows = [batch.rows[index] for index in chosen]
            logprobs = torch.cat([known[row.targets.tobytes() + row.ids.tobytes()] for row in rows])
            objective(join_rows(rows), Outputs(logprobs, None))
        losses.append(tally.reduce(ranks).mean("loss"))
    assert losses[0] == losses[1] == losses[2]


def test_the_step_does_not_depend_on_the_micro_batches(tiny_model: str, ranks: Ranks) -> None:
    results = [run(learner(tiny_model, ranks, micro_batch_tokens=b), trajectories()) for b in (1, 64, 4096)]
    for metrics, weights in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0][0]["loss"], abs=1e-7)
        assert metrics["grad_norm"] == pytest.approx(results[0][0]["grad_norm"], rel=1e-5)
        torch.testing.assert_close(weights, results[0][1], atol=1e-5, rtol=0)


def test_the_step_does_not_depend_on_whether_prompts_are_shared(tiny_model: str, ranks: Ranks) -> None:
    results = []
    for share in (True, False):
        groups = [[with_prompt(one, group[0]) for one in group] for group in trajectories()]
        learn, engine = learner(tiny_model, ranks, share_prompts=share)
        packs = learn.score(batch_of(engine, groups)).minibatches[0]
        assert any(pack.parents is not None for pack in packs) == share
        results.append(run((learn, engine), groups))
    (shared, weights), (apart, expected) = results
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-6)
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)


def with_prompt(one: Trajectory, of: Trajectory) -> Trajectory:
    return replace(one, segments=[replace(one.segments[0], prompt_ids=of.segments[0].prompt_ids)])


def test_the_gradient_is_the_hand_written_one(tiny_model: str, ranks: Ranks) -> None:
    """At one minibatch ρ = 1: the gradient is −mean over tokens of w · A · ∇logπ."""
    learn, engine = learner(tiny_model, ranks)
    batch = batch_of(engine, trajectories())
    scored = learn.score(batch)
    advantages = learn.advantages(batch, scored)
    (pack,) = pack_rows(batch.rows, 100000)
    logprobs = engine.policy(pack).logprobs
    weights = (logprobs - pack.behaviour).exp().clamp(max=2.0).detach()
    expected = -(weights * advantages.tokens.float()[pack.token] * logprobs).sum() / len(logprobs)
    grads = torch.autograd.grad(expected, list(engine.policy.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    metrics = learn.update(batch, scored, advantages)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_tokens_over_the_bound_carry_no_gradient(tiny_model: str, ranks: Ranks) -> None:
    def spoiled(value: float) -> list[list[Trajectory]]:
        groups = trajectories(groups=1, version=1)
        segment = groups[0][0].segments[0]
        logprobs = segment.response_logprobs.copy()
        logprobs[0] = value
        spans = np.array([[0, 0, 1], [1, 1, len(logprobs)]], dtype=np.int32)
        changed = replace(segment, response_logprobs=logprobs, version_spans=spans)
        groups[0][0] = replace(groups[0][0], segments=[changed])
        return groups

    one, one_weights = run(learner(tiny_model, ranks), spoiled(-1.0), step=2, bound=1)
    two, two_weights = run(learner(tiny_model, ranks), spoiled(-9.0), step=2, bound=1)
    assert one["tokens_masked"] == 1
    assert one["staleness_max"] == 1
    assert one["tokens_trained"] == one["tokens_sampled"] - 1
    assert torch.equal(one_weights, two_weights)
    assert one["loss"] == two["loss"]


def test_an_episode_weighs_the_same_in_one_segment_and_in_two(tiny_model: str, ranks: Ranks) -> None:
    """Doubled segments (same tokens twice) weigh as two; the same tokens split over episodes weigh as they are."""
    groups = trajectories(groups=1, members=2)
    first, second = groups[0]
    moved = [[replace(first, segments=[*first.segments, *second.segments]), replace(second, segments=[])]]
    learn, engine = learner(tiny_model, ranks)
    joined = batch_of(engine, moved)
    metrics = learn.update(joined, learn.score(joined), constant(joined))
    apart, other = learner(tiny_model, ranks)
    batch = batch_of(other, groups)
    expected = apart.update(batch, apart.score(batch), constant(batch))
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)


def test_minibatches_clip_against_the_policy_at_the_start_of_the_step(tiny_model: str, ranks: Ranks) -> None:
    metrics, _ = run(learner(tiny_model, ranks, minibatches=2, lr=0.1), trajectories())
    assert metrics["updates"] == 2
    assert metrics["clip_fraction_high"] + metrics["clip_fraction_low"] > 0.05
    single, _ = run(learner(tiny_model, ranks), trajectories())
    assert single["clip_fraction_high"] == single["clip_fraction_low"] == 0
    assert single["logprob_abs_diff_all_mean"] == pytest.approx(metrics["logprob_abs_diff_all_mean"], abs=1e-6)


def test_the_mismatch_is_zero_for_the_trainers_own_logprobs(tiny_model: str, ranks: Ranks) -> None:
    learn, engine = learner(tiny_model, ranks)
    groups = trajectories(version=1)
    batch = batch_of(engine, groups)
    for index, row in enumerate(batch.rows):
        (own,) = engine.score(pack_rows([row], 1))
        batch.rows[index] = replace(row, behaviour=own.numpy())
    scored = learn.score(batch)
    metrics = learn.update(batch, scored, learn.advantages(batch, scored))
    assert metrics["logprob_abs_diff_max"] < 1e-5
    assert metrics["logprob_abs_diff_tokens"] == metrics["tokens_trained"]
    assert metrics["effective_sample_share"] == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["kl_k3"]) < 1e-9
    assert metrics["staleness_tokens"] == {"0": metrics["tokens_trained"]}


def test_an_update_raises_the_probability_of_what_was_better(tiny_model: str, ranks: Ranks) -> None:
    learn, engine = learner(tiny_model, ranks, correction=None)
    batch = batch_of(engine, trajectories(groups=2))
    (pack,) = pack_rows(batch.rows, 100000)
    scored = learn.score(batch)
    advantages = learn.advantages(batch, scored)
    (before,) = engine.score([pack])
    learn.update(batch, scored, advantages)
    (after,) = engine.score([pack])
    gain = ((after - before) * advantages.tokens.float()[pack.token]).mean()
    assert gain > 0.01


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_then_stops(tiny_model: str, ranks: Ranks) -> None:
    pair = learner(tiny_model, ranks, loss="trainer_support:broken_loss", max_bad_steps=2)
    before = torch.cat([t.flatten() for _, t in pair[1].weights(torch.float32)])
    for _ in range(2):
        metrics, weights = run(pair, trajectories())
        assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
        assert torch.equal(weights, before)
    with pytest.raises(TrainingDiverged, match="gradient norm nan; 3 steps in a row"):
        run(pair, trajectories())


def test_a_step_with_nothing_to_train_changes_nothing(tiny_model: str, ranks: Ranks) -> None:
    pair = learner(tiny_model, ranks)
    before = torch.cat([t.flatten() for _, t in pair[1].weights(torch.float32)])
    metrics, weights = run(pair, trajectories(), step=9, bound=0)
    assert metrics["tokens_trained"] == 0
    assert metrics["updates_skipped"] == 1
    assert torch.equal(weights, before)


def test_metrics_of_the_batch(tiny_model: str, ranks: Ranks) -> None:
    groups = trajectories(groups=2)
    groups[1] = [replace(t, reward=1.0) for t in groups[1]]
    rewards = np.array([t.reward for group in groups for t in group])
    metrics, _ = run(learner(tiny_model, ranks), groups)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(rewards.std())
    assert metrics["zero_variance_groups"] == 1
    assert metrics["episode/tool_calls"] == pytest.approx(2.5)
    assert metrics["outcome/completed"] == 8
    assert metrics["tokens_sampled"] == sum(t.num_sampled for group in groups for t in group)
    assert metrics["staleness_tokens"] == {"1": metrics["tokens_trained"]}
