"""Token ids as Python ints, one object per id and process.

A worker holds the context of each episode that waits for the model, as a list. With objects of its own a list takes
40 bytes per token, with shared ones 8, and is made faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST = 1 << 20
"""Ids from here on (no vocabulary has them) get objects of their own."""
_INTS: NDArray[np.object_] = np.arange(0, dtype=object)


def shared_ints(ids: NDArray[np.int32]) -> list[int]:
    """`ids` as a list."""
    global _INTS
    most = int(ids.max(initial=0))
    if most >= MOST or ids.min(initial=0) < 0:
        return ids.tolist()
    if most >= len(_INTS):
        _INTS = np.arange(2 ** most.bit_length(), dtype=object)
    return _INTS[ids].tolist()
