"""Rounds of a fault test: each with a seed of its own, printed, and repeated by ``PENSTOCK_FAULT_SEED``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

SEED_VARIABLE = "PENSTOCK_FAULT_SEED"


def seeds(rounds: int) -> Iterator[int]:
    """The seed asked for, once, or `rounds` random ones."""
    asked = os.environ.get(SEED_VARIABLE)
    for seed in [int(asked)] if asked else [random.randrange(10**6) for _ in range(rounds)]:
        print(f"{SEED_VARIABLE}={seed}")
        yield seed
