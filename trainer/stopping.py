"""Whether a run is over before its last step: a target is reached, or nothing gets better any more.

    recorder ──every step and evaluation──► see ──► why() ──► the loop, on all ranks together, before the next step

The verdict hangs on the lines of ``metrics.jsonl`` alone: a restarted trainer comes to the same one.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.trainer.algorithm import BadJob
from penstock.trainer.config import StopConfig

EVALUATION = "eval/"
SOMETIMES = (EVALUATION, "episode/", "outcome/")
"""Names that begin so are not in every line."""


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
        if self._config.enabled and name not in line and not name.startswith(SOMETIMES):
            near = difflib.get_close_matches(name, line, n=1)
            mend = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(line))}"
            raise BadJob(f"trainer.stop.metric is {name!r}, and metrics.jsonl has no such name{mend}")

    def why(self) -> str | None:
        """One line for people; None where the run is to go on."""
        with self._lock:
            values = sorted(self._values.items())
        config, window = self._config, self._config.window
        if not config.enabled or len(values) < window:
            return None
        means = np.convolve([value for _, value in values], np.ones(window), mode="valid") / window
        better = means if config.better == "higher" else -means
        what = config.metric if window == 1 else f"the mean of {window} values of {config.metric}"
        version, best = values[-1][0], int(better.argmax())
        if config.target is not None and _reached(means[-1], config.target, config.better):
            return f"{what} is {means[-1]:.6g} at version {version}: the target {config.target:g} is reached"
        if config.patience and len(means) - 1 - best >= config.patience:
            since = values[best + window - 1][0]
            return f"{what} is no better than {means[best]:.6g}, of version {since}, in {config.patience} values since"
        return None


def _reached(value: float, target: float, better: str) -> bool:
    return value >= target if better == "higher" else value <= target
