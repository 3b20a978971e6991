"""Quantiles of samples, medians of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_of(rounds: Sequence[Sequence[float]], share: float) -> float:
    """Median over the rounds of each round's quantile."""
    return median(quantile(samples, share) for samples in rounds)


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
