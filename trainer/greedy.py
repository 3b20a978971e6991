"""The greedy member of each group, for ReMax: the baseline of the others, and not trained on itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithm import GREEDY_MEMBER
from penstock.trainer.batch import StepBatch


def without_greedy(batch: StepBatch) -> StepBatch:
    """Greedy episodes are not trained on, nor is a group whose greedy member was lost: it has no baseline."""
    greedy = greedy_members(batch)
    trained = ~greedy & np.isin(batch.group, batch.group[greedy])
    rows = [replace(row, mask=row.mask & trained[row.episode]) for row in batch.rows]
    return replace(batch, rows=rows)


def greedy_members(batch: StepBatch) -> NDArray[np.bool_]:
    """[E]"""
    return np.array([t.episode_id.endswith(f"#{GREEDY_MEMBER}") for t in batch.trajectories], dtype=np.bool_)


def greedy_baselines(batch: StepBatch, returns: Tensor) -> Tensor:
    """returns [E] → [E] that of the group's greedy member; 0 where it was lost"""
    greedy = greedy_members(batch)
    by_group = dict(zip(batch.group[greedy].tolist(), returns.numpy()[greedy].tolist(), strict=True))
    return torch.tensor([by_group.get(group, 0.0) for group in batch.group.tolist()], dtype=torch.float64)
