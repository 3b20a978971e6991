"""Decides if a run is over before its last step: a target is reached, or nothing gets better any more.

    recorder ──every step and evaluation──► see ──► why() ──► the loop, on all ranks together, before the next step

The verdict hangs on the lines of ``metrics.jsonl`` alone: a restarted trainer comes to the same one.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common import nearest
from penstock.trainer.config import StopConfig
from penstock.trainer.job import BadJob
from penstock.transfer_queue import is_reached

if TYPE_CHECKING:
    from penstock.trainer.batch import StepBatch
    from penstock.trainer.engine import Update
    from penstock.trainer.ranks.distributed import Ranks

EVALUATION = "eval/"


class Stopping:
    """Remembers one number by version. Its calls may come from several threads."""

    def __init__(self, config: StopConfig) -> None:
        self._config = config
        self._values: dict[int, float] = {}
        self._lock = threading.Lock()

    def begin(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Forget everything but these lines of metrics."""
        with self._lock:
            self._values = {}
        for line in lines:
            self.see(line["version"], line)

    def see(self, version: int, line: Mapping[str, Any]) -> None:
        """The numbers of a step, or of an evaluation; a value that is missing or no number counts for nothing."""
        value = line.get(self._config.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            with self._lock:
                self._values[version] = float(value)

    def check(self, line: Mapping[str, Any]) -> None:
        """Raises `BadJob` where a step's whole line has no such name: the run would never stop."""
        name = self._config.metric
        # Names that begin so are not in every line.
        sometimes = (EVALUATION, "episode/", "outcome/", "source/", "curriculum/")
        if self._config.enabled and name not in line and not name.startswith(sometimes):
            fix = nearest(name, line) or f"; there are {', '.join(sorted(line))}"
            raise BadJob(f"trainer.stop.metric is {name!r}, and metrics.jsonl has no such name{fix}")

    def why(self) -> str | None:
        """One line for people; None where the run is to continue."""
        with self._lock:
            values = sorted(self._values.items())
        config, window = self._config, self._config.window
        if not config.enabled or len(values) < window:
            return None
        means = np.convolve([value for _, value in values], np.ones(window), mode="valid") / window
        sign = 1 if config.better == "higher" else -1
        is_enough = is_reached if "reward" in config.metric else operator.ge
        what = config.metric if window == 1 else f"the mean of {window} values of {config.metric}"
        highest = (sign * means).max()
        version, best = values[-1][0], next(n for n, mean in enumerate(means) if is_enough(sign * mean, highest))
        if config.target is not None and is_enough(sign * means[-1], sign * config.target):
            return f"{what} is {means[-1]:.6g} at version {version}: the target {config.target:g} is reached"
        if config.patience and len(means) - 1 - best >= config.patience:
            since = values[best + window - 1][0]
            return f"{what} is not better than {means[best]:.6g}, of version {since}, in {config.patience} values since"
        return None


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

    def check(self, batch: StepBatch, updates: Sequence[Update | None], ranks: Ranks, *, again: bool = False) -> None:
        """A collective. `again`: an empty step was let pass or passed when its version was published, and does not
        count. Raises `TrainingDiverged`, `NothingToTrain`."""
        done = [update for update in updates if update is not None]
        self._skipped = self._skipped + 1 if any(update.skipped for update in done) else 0
        if self._skipped:
            self._say(batch.step, done)
        if done:
            self._empty = 0
        elif not again:
            self._empty += 1
            self._say_empty(batch, ranks)

    def _say(self, step: int, updates: Sequence[Update]) -> None:
        problem = ", ".join(f"loss {update.loss}, gradient norm {update.grad_norm}" for update in updates)
        if self._skipped <= self._most:
            logger.error("step %d is skipped: %s", step, problem)
            return
        raise TrainingDiverged(
            f"step {step}: {problem}; {self._skipped} steps in a row were not finite (trainer.max_bad_steps is "
            f"{self._most}). Lower trainer.lr, or start from a checkpoint"
        )

    def _say_empty(self, batch: StepBatch, ranks: Ranks) -> None:
        sampled = ranks.sum(sum(len(row.targets) for row in batch.rows))
        missing = ranks.sum(tokens_without_logprob(batch))
        problem = (
            f"step {batch.step} has no token to train on: {sampled:.0f} were sampled, {missing:.0f} of them have no "
            f"finite logprob, the others are older than max_staleness"
        )
        if self._empty <= self._most:
            logger.error("%s; its version has the weights of the one before", problem)
            return
        raise NothingToTrain(
            f"{problem}; {self._empty} steps in a row (trainer.max_bad_steps is {self._most}). "
            + ("Does the engine return logprobs?" if sampled else "Earlier lines say why each episode was left out")
        )


def tokens_without_logprob(batch: StepBatch) -> int:
    """Sampled tokens of this rank whose logprob is missing, NaN or infinite: never trained on."""
    segments = (segment for trajectory in batch.trajectories for segment in trajectory.segments)
    return sum(int((~np.isfinite(s.response_logprobs[s.response_mask == 1])).sum()) for s in segments)
