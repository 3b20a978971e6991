"""Figures of an evaluation: mean reward, pass@k, and their confidence intervals.

**pass@k** of a task with n samples of which c are right, without bias (Chen et al. 2021, "Evaluating Large Language
Models Trained on Code", arXiv:2107.03374, equation 1): the chance that k of them, drawn without putting back, hold a
right one.

    pass@k = 1 − C(n − c, k) / C(n, k) = 1 − Π_{i = n − c + 1 … n} (1 − k / i)

**Intervals** are percentiles of the mean over tasks drawn with replacement, all samples of a task together (Efron &
Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13): samples of one task are not independent. Where all
tasks have the same value there is nothing to resample; if that is 0 or 1, Wilson's score interval of as many trials
stands there instead (Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Raises `ValueError` where fewer than k samples were drawn."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right: needs 1 <= k <= samples, right <= samples")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of one value per task; the same values give the same interval. Raises `ValueError` without
    values.
    """
    if not len(values):
        raise ValueError("an estimate needs at least one task")
    tasks = np.asarray(values, dtype=np.float64)  # [T]
    mean = float(tasks.mean())
    if np.ptp(tasks) > 0:
        dice, means = np.random.default_rng(0), list[NDArray[np.float64]]()
        at_once = max(1, (1 << 22) // len(tasks))  # bounds the memory of resampling: numbers held at a time
        for start in range(0, RESAMPLES, at_once):
            count = min(at_once, RESAMPLES - start)
            means.append(tasks[dice.integers(0, len(tasks), (count, len(tasks)))].mean(axis=1))
        tail = (1 - CONFIDENCE) / 2
        low, high = map(float, np.quantile(np.concatenate(means), [tail, 1 - tail]))
    elif tasks[0] in (0.0, 1.0):
        low, high = wilson(mean, len(tasks))
    else:
        low = high = mean
    return Estimate(mean, low, high)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return the interval of a share of successes among independent trials."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    middle, whole = share + z * z / (2 * trials), 1 + z * z / trials
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)
