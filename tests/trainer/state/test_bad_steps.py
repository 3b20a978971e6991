"""Losses and gradients that are not finite: skipped and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from tests.tiny_model import save_poisoned_model
from trainer_support import make_trajectory

from penstock.trainer import (
    Ranks,
    StepBatch,
    TrainingDiverged,
)
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.stopping import NothingToTrain

pytestmark = pytest.mark.torch


@pytest.fixture
def broken() -> Iterator[Callable[..., str]]:
    """Registers a loss that `spoil` changes, per trained token of a pack."""

    def register(spoil: Callable[[LossInput, torch.Tensor], torch.Tensor]) -> str:
        @LOSSES.register("broken")
        def loss(batch: LossInput) -> TokenLoss:
            result = LOSSES.get("decoupled_ppo")(batch)
            return replace(result, per_token=spoil(batch, result.per_token))

        return "broken"

    yield register
    LOSSES._entries.pop("broken", None)


class Run(Step):
    """A learner of batches that may be spoilt."""

    def __init__(self, model: str, ranks: Ranks, **settings: Any) -> None:
        super().__init__(model, ranks, **{"max_bad_steps": 2, **settings})

    def batch(self, step: int = 1, spoil: Callable[[Any], Any] = lambda t: t) -> StepBatch:
        made = [[spoil(make_trajectory(f"train/{g}", m, 0)) for m in range(4)] for g in range(4)]
        return self.batch_of(made, step, bound=9)


def test_a_nan_weight_changes_nothing(tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(save_poisoned_model(tmp_path / "model"), ranks)
    before = run.weights()
    metrics = run.train(run.batch())
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0, equal_nan=True)
    assert "step 1 is skipped: loss nan" in caplog.text


def test_a_later_minibatch_alone_is_skipped(tiny_model: str, ranks: Ranks, broken: Any) -> None:
    """Its loss is finite, its gradient is not."""
    wanted: list[int] = []

    def spoil(batch: LossInput, per_token: torch.Tensor) -> torch.Tensor:
        if len(per_token) != wanted[0]:
            return per_token
        return per_token + (batch.logprobs - batch.logprobs.detach()).sqrt()  # 0, with an infinite slope

    run = Run(tiny_model, ranks, loss=broken(spoil), minibatches=2, lr=0.1, micro_batch_tokens=100_000)
    batch = run.batch()
    wanted.append(int(run.learner.score(batch).minibatches[1][0].mask.sum()))
    before = run.weights()
    metrics = run.train(batch)
    assert (metrics["updates"], metrics["updates_skipped"]) == (1, 1)
    assert not torch.equal(run.weights(), before), "the first minibatch was trained"


def test_a_loss_alone_that_is_not_finite_is_skipped_too(tiny_model: str, ranks: Ranks, broken: Any) -> None:
    """An infinite constant has no gradient: the norm says nothing of it."""
    run = Run(tiny_model, ranks, loss=broken(lambda batch, per_token: per_token + math.inf))
    before = run.weights()
    metrics = run.train(run.batch())
    assert math.isfinite(metrics["grad_norm"])
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
    assert torch.equal(run.weights(), before)


def test_more_bad_steps_in_a_row_than_allowed_end_the_run(tiny_model: str, ranks: Ranks, broken: Any) -> None:
    run = Run(tiny_model, ranks, max_bad_steps=2, loss=broken(lambda batch, per_token: per_token * math.nan))
    for step in range(2):
        run.train(run.batch(step=step))
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        run.train(run.batch(step=2))


def test_steps_without_a_token_to_train_are_counted_and_then_stop_the_run(tiny_model: str, ranks: Ranks) -> None:
    def without_logprobs(trajectory: Any) -> Any:
        segments = [replace(s, response_logprobs=s.response_logprobs * math.nan) for s in trajectory.segments]
        return replace(trajectory, segments=segments)

    run = Run(tiny_model, ranks)
    before = run.weights()
    for _ in range(2):
        metrics = run.train(run.batch(spoil=without_logprobs))
        assert metrics["tokens_without_logprob"] == metrics["tokens_masked"] == metrics["tokens_sampled"] > 0
        assert (metrics["updates"], metrics["updates_skipped"], metrics["loss"]) == (0, 1, 0.0)
        assert torch.equal(run.weights(), before)
    run.train(run.batch())
    for _ in range(2):
        run.train(run.batch(spoil=without_logprobs))
    with pytest.raises(NothingToTrain, match=r"have no finite logprob.*3 steps in a row.*return logprobs"):
        run.train(run.batch(spoil=without_logprobs))


def test_episodes_without_tokens_and_groups_of_one_are_counted_and_the_rest_is_trained(
    tiny_model: str, ranks: Ranks
) -> None:
    run = Run(tiny_model, ranks)
    groups = [[make_trajectory("train/0", m, 0) for m in range(4)], [make_trajectory("train/1", 0, 0)]]
    groups[0][1] = replace(groups[0][1], segments=[])
    batch = run.batch_of(groups, bound=9)
    metrics = run.train(batch)
    assert (metrics["empty_episodes"], metrics["single_member_groups"], metrics["updates"]) == (1, 1, 1)
    scored = run.learner.score(batch)
    advantages = run.learner.advantages(batch, scored).tokens
    alone = [row for row in batch.rows if row.episode == 4]
    assert all(not advantages[row.first_token : row.first_token + len(row.targets)].any() for row in alone)
