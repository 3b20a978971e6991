"""A learner of its own, and its steps on batches by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.trainer import Learner, Ranks, StepBatch, TrainerConfig, make_step_batch
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.transfer_queue import Batch, Trajectory


class Step:
    """`settings` are those of the trainer; gradients are not clipped by default."""

    def __init__(self, model: str, ranks: Ranks, **settings: Any) -> None:
        self.config = TrainerConfig(**{"lr": 1e-2, "eps": 1e-4, "max_grad_norm": 1e9, **settings})
        self.engine = FSDPEngine(model, self.config, ranks)
        self.learner = Learner(self.config, self.engine, ranks)

    def batch_of(self, groups: Sequence[Sequence[Trajectory]], step: int = 1, bound: int = 2) -> StepBatch:
        ids = Batch(step, [[one.episode_id for one in group] for group in groups])
        flat = [one for group in groups for one in group]
        return make_step_batch(ids, list(range(len(groups))), flat, bound, self.engine.limits)

    def train(self, batch: StepBatch) -> dict[str, Any]:
        """The step's metrics."""
        scored = self.learner.score(batch)
        return self.learner.update(batch, scored, self.learner.advantages(batch, scored))

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.engine.weights(torch.float32)])
