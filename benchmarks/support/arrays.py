"""The payload every store is given: the arrays of one finished episode, of about a wanted size.

Imported in the environment of the compared queue too, hence without Penstock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = 100
BYTES_PER_TOKEN = 9
"""Of the response: id (4), logprob (4), mask (1)."""
SIZES = {"32kb": 32_000, "1mb": 1_000_000, "8mb": 8_000_000}
"""Name → bytes of its arrays."""


def payload_arrays(size: str) -> dict[str, NDArray[Any]]:
    """Field → values, as `Segment` names them. The same bytes in every process."""
    tokens = SIZES[size] // BYTES_PER_TOKEN
    rng = np.random.default_rng(0)
    return {
        "prompt_ids": rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32),
        "response_ids": rng.integers(0, 50_000, tokens, dtype=np.int32),
        "response_mask": np.ones(tokens, dtype=np.uint8),
        "response_logprobs": -rng.random(tokens, dtype=np.float32),
        "version_spans": np.array([[0, 0, tokens]], dtype=np.int32),
        "turn_starts": np.array([0], dtype=np.int32),
    }
