"""Overlong reward shaping: long episodes lose reward gradually before they hit the limit.

    penalty(l) = 0                                l ≤ length − buffer
               = −p · (l − (length − buffer)) / buffer       in between
               = −p                               l ≥ length               l = sampled tokens of the episode

Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.4, equation 13 (soft overlong punishment).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.config import OverlongConfig


def overlong_penalties(lengths: NDArray[np.int64], config: OverlongConfig) -> NDArray[np.float64]:
    """lengths [E] → [E], each 0 or below"""
    if config.length == 0:
        return np.zeros(len(lengths))
    beyond = lengths - (config.length - config.buffer)
    share = beyond / config.buffer if config.buffer else (lengths >= config.length).astype(np.float64)
    return -config.penalty * np.clip(share, 0.0, 1.0)
