"""Token ids as Python ints, one object per id and process.

A worker holds the context of each episode that waits for the model, as a list. With objects of its own a list takes
40 bytes per token, with shared ones 8, and is made faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1 << 20
"""Ids from here on (no vocabulary has them) get objects of their own."""


class SharedInts:
    """Grows to the largest id that was asked for, so to the vocabulary in use."""

    def __init__(self) -> None:
        self._ints: NDArray[Any] = np.arange(0, dtype=object)

    def of(self, ids: NDArray[np.int32]) -> list[int]:
        """`ids` as a list."""
        most = int(ids.max(initial=0))
        if most >= MOST or ids.min(initial=0) < 0:
            return [int(one) for one in ids]
        if most >= len(self._ints):
            self._ints = np.arange(1 << most.bit_length(), dtype=object)
        whole: list[int] = self._ints[ids].tolist()
        return whole


SHARED = SharedInts()
