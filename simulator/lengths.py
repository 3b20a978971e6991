"""Log-normal draws with a ceiling: response lengths, tool times."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Draws = NDArray[np.float64]


class LogNormal(BaseModel):
    """``min(longest, median * exp(sigma * z))``, z standard normal. What would be longer is cut, as engines cut it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float = Field(ge=0, description="Half of the draws are below. Tokens or seconds, as the key says.")
    sigma: float = Field(
        1.0, ge=0, description="Spread of the logarithm; 0: all the same. Measured lengths: 0.7 to 1.3."
    )
    longest: float | None = Field(None, gt=0, description="Ceiling: the token limit, or the time-out. None: none.")

    def of(self, z: Draws) -> Draws:
        drawn = self.median * np.exp(self.sigma * z)
        return drawn if self.longest is None else np.minimum(self.longest, drawn)

    @property
    def mean(self) -> float:
        """Closed form: E[min(L, X)] = m·e^(σ²/2)·Φ(c − σ) + L·(1 − Φ(c)) with c = ln(L/m)/σ."""
        uncut = self.median * math.exp(self.sigma**2 / 2)
        if self.longest is None:
            return uncut
        if not self.sigma or not self.median:
            return min(self.longest, uncut)
        normal, cut = NormalDist(), math.log(self.longest / self.median) / self.sigma
        return uncut * normal.cdf(cut - self.sigma) + self.longest * (1 - normal.cdf(cut))


def reaching(longest: float, draws: int, sigma: float) -> LogNormal:
    """The distribution of which one in `draws` is expected to reach `longest`: its (1 − 1/draws)-quantile is there."""
    z = NormalDist().inv_cdf(1 - 1 / max(2, draws))
    return LogNormal(median=longest * math.exp(-sigma * z), sigma=sigma, longest=longest)
