"""A batch of episodes, told by a few numbers: every side makes the same ids and rewards of them."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

REWARDS = (0.0, 1.0)


@dataclass(frozen=True)
class Work:
    """What one optimizer step trains on. Prompts are fed, all else is sampled."""

    lengths: tuple[int, ...]
    """Sampled tokens of each row, in the order of the batch."""
    prompt: int
    """Tokens before them, in each row."""
    vocab: int
    group_size: int = 4
    seed: int = 0

    @classmethod
    def read(cls, values: dict[str, Any]) -> Work:
        return cls(**{**values, "lengths": tuple(values["lengths"])})

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def tokens(self) -> int:
        """Of all rows, prompts with them, padding not."""
        return sum(self.lengths) + self.prompt * len(self.lengths)

    def row(self, index: int) -> NDArray[np.int64]:
        """[prompt + length] the ids of one row. Ids 0 and 1 are left to padding and to the end."""
        rng = np.random.default_rng((self.seed, index))
        return rng.integers(2, self.vocab, self.prompt + self.lengths[index])

    def reward(self, episode: int) -> float:
        """Each group has both rewards, so that none is without signal."""
        member = episode % self.group_size
        return REWARDS[(member + episode // self.group_size) % 2]

    def advantages(self) -> list[float]:
        """By episode: (R − mean) / (std + 1e-4), std with n − 1, as TRL has it. For sides that do not estimate."""
        rewards = np.array([self.reward(episode) for episode in range(len(self.lengths))])
        grouped = rewards.reshape(-1, self.group_size)
        found = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + EPSILON)
        return [float(one) for one in found.flatten()]


EPSILON = 1e-4
"""TRL's, in the denominator of an advantage."""


def log_normal_lengths(rows: int, mean: float, sigma: float, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Log-normal around `mean`, cut at `longest`; the middles of `rows` equal parts of the distribution, shuffled.

    Not drawn: a few dozen draws would have another longest row, and another share of padding, with every seed.
    """
    normal = NormalDist(-(sigma**2) / 2, sigma)
    raw = [mean * math.exp(normal.inv_cdf((index + 0.5) / rows)) for index in range(rows)]
    lengths = [max(1, min(longest, round(length))) for length in raw]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)
