"""The algorithm of one step on one rank: pack, score, advantages, update. All of it runs in the torch thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.advantages import ADVANTAGES, GroupedRewards
from penstock.trainer.batch import StepBatch, minibatch_bounds
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engine import Engine, Update
from penstock.trainer.metrics import step_metrics
from penstock.trainer.objective import Objective
from penstock.trainer.packing import Pack, pack_rows
from penstock.trainer.ranks import Ranks
from penstock.trainer.tally import Tally

Minibatches = list[list[Pack]]


class TrainingDiverged(RuntimeError):
    """More steps in a row than trainer.max_bad_steps had a gradient that was not finite."""


class Learner:
    """Everything between a batch and new weights."""

    def __init__(self, config: TrainerConfig, engine: Engine, ranks: Ranks) -> None:
        self._config = config
        self._engine = engine
        self._ranks = ranks
        self._bad_steps = 0

    def score(self, batch: StepBatch) -> Minibatches:
        """The batch in packs. With one minibatch the training forward's own logprobs are the proximal policy's;
        with more, the later ones are trained after the weights have moved, so all are scored first."""
        minibatches = [pack_rows(rows, self._config.micro_batch_tokens) for rows in self._split(batch)]
        if self._config.minibatches == 1:
            return minibatches
        return [
            [replace(p, proximal=s) for p, s in zip(packs, self._engine.score(packs), strict=True)]
            for packs in minibatches
        ]

    def advantages(self, batch: StepBatch) -> Tensor:
        """[E] float64"""
        rewards = GroupedRewards(torch.from_numpy(batch.rewards), torch.from_numpy(batch.group))
        return ADVANTAGES.get(self._config.advantage)(rewards)

    def update(self, batch: StepBatch, minibatches: Minibatches, advantages: Tensor) -> dict[str, Any]:
        """New weights; returns the step's metrics, the same on all ranks. Raises `TrainingDiverged`."""
        tally = Tally()
        objective = Objective(self._config, advantages.float(), tally)
        updates = [self._update_one(packs, objective, batch.step) for packs in minibatches]
        self._count_bad_steps(batch.step, [update for update in updates if update is not None])
        tally_batch(tally, batch, advantages)
        return step_metrics(batch, tally.reduce(self._ranks), updates)

    def _update_one(self, packs: list[Pack], objective: Objective, step: int) -> Update | None:
        tokens = self._ranks.sum(sum(int(pack.mask.sum()) for pack in packs))
        # Nothing to train on (all masked, or no token was sampled): the version still advances, with equal weights.
        return self._engine.update(packs, objective, tokens, step) if tokens else None

    def _split(self, batch: StepBatch) -> list[list]:
        bounds = minibatch_bounds(len(batch.groups), self._config.minibatches)
        return [[row for row in batch.rows if start <= batch.group[row.episode] < end] for start, end in bounds]

    def _count_bad_steps(self, step: int, updates: list[Update]) -> None:
        self._bad_steps = self._bad_steps + 1 if any(update.skipped for update in updates) else 0
        if self._bad_steps > self._config.max_bad_steps:
            norms = ", ".join(f"{update.grad_norm}" for update in updates)
            raise TrainingDiverged(
                f"step {step}: gradient norm {norms}; {self._bad_steps} steps in a row were not finite "
                f"(trainer.max_bad_steps is {self._config.max_bad_steps}). Lower trainer.lr, or start from a checkpoint"
            )


def tally_batch(tally: Tally, batch: StepBatch, advantages: Tensor) -> None:
    """What the batch itself says: rewards, lengths, groups without signal, tokens left out."""
    tally.add("reward", batch.rewards)
    tally.add("reward_squared", batch.rewards**2)
    tally.add("advantage_abs", advantages.abs().numpy())
    tally.add("response_length", [sum(len(s.response_ids) for s in t.segments) for t in batch.trajectories])
    tally.add("sampled_length", [t.num_sampled for t in batch.trajectories])
    tally.add("num_turns", [t.num_turns for t in batch.trajectories])
    silent = [g for g in np.unique(batch.group) if not advantages[torch.from_numpy(batch.group == g)].any()]
    tally.count("zero_variance_groups", len(silent))
    tally.count("segments", len(batch.rows))
    for trajectory in batch.trajectories:
        tally.count(f"outcome/{trajectory.outcome.kind}", 1)
        for name, value in trajectory.metrics.items():
            tally.add(f"episode/{name}", value)
    _tally_tokens(tally, batch)


def _tally_tokens(tally: Tally, batch: StepBatch) -> None:
    for row in batch.rows:
        tally.count("tokens", len(row.ids))
        tally.count("tokens_sampled", len(row.targets))
        tally.count("tokens_trained", int(row.mask.sum()))
        tally.count("tokens_masked", int((~row.mask).sum()))
        for age, number in zip(*np.unique(row.staleness[row.mask], return_counts=True), strict=True):
            tally.count(f"staleness/{age}", number)
