"""When to stop a run that does not train any more."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from penstock.trainer.batch import StepBatch
from penstock.trainer.ranks import Ranks
from penstock.trainer.sharded import Update

logger = logging.getLogger(__name__)


class TrainingDiverged(RuntimeError):
    """More steps in a row than trainer.max_bad_steps had a loss or gradient that was not finite."""


class NothingToTrain(TrainingDiverged):
    """More steps in a row than trainer.max_bad_steps had no token that may be trained on."""


class BadSteps:
    """Counts steps in a row that were skipped, and steps in a row that were empty; all ranks count the same."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._skipped = 0
        self._empty = 0
        self.kept = ""
        """The newest dump."""

    def check(self, batch: StepBatch, updates: Sequence[Update | None], ranks: Ranks) -> None:
        """A collective. Raises `TrainingDiverged`, `NothingToTrain`."""
        done = [update for update in updates if update is not None]
        self._skipped = self._skipped + 1 if any(update.skipped for update in done) else 0
        self._empty = 0 if done else self._empty + 1
        if self._skipped:
            self._say(batch.step, done)
        if self._empty:
            self._say_empty(batch, ranks)

    def _say(self, step: int, updates: Sequence[Update]) -> None:
        said = ", ".join(f"loss {update.loss}, gradient norm {update.grad_norm}" for update in updates)
        if self._skipped <= self._most:
            logger.error("step %d is skipped: %s%s", step, said, self._how_to_replay())
            return
        raise TrainingDiverged(
            f"step {step}: {said}; {self._skipped} steps in a row were not finite (trainer.max_bad_steps is "
            f"{self._most}). Lower trainer.lr, or start from a checkpoint{self._how_to_replay()}"
        )

    def _say_empty(self, batch: StepBatch, ranks: Ranks) -> None:
        sampled = ranks.sum(sum(len(row.targets) for row in batch.rows))
        missing = ranks.sum(tokens_without_logprob(batch))
        said = (
            f"step {batch.step} has no token to train on: {sampled:.0f} were sampled, {missing:.0f} of them have no "
            f"finite logprob, the others are older than max_staleness"
        )
        if self._empty <= self._most:
            logger.error("%s; its version has the weights of the one before", said)
            return
        raise NothingToTrain(
            f"{said}; {self._empty} steps in a row (trainer.max_bad_steps is {self._most}). Does the engine return "
            "logprobs?"
        )

    def _how_to_replay(self) -> str:
        return f"; look into it: penstock train replay {self.kept}" if self.kept else ""


def tokens_without_logprob(batch: StepBatch) -> int:
    """Sampled tokens of this rank whose logprob is missing, NaN or infinite: never trained on."""
    segments = (segment for trajectory in batch.trajectories for segment in trajectory.segments)
    return sum(int((~np.isfinite(s.response_logprobs[s.response_mask == 1])).sum()) for s in segments)
