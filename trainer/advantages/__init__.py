"""Advantage estimators: one number per episode from the rewards of its group. One file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.trainer.registry import Registry


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """What an estimator sees. E = episodes; groups are whole on a rank, members of unequal number."""

    rewards: Tensor
    """[E] float64"""
    group: Tensor
    """[E] int64, the group that each episode belongs to"""


Estimator = Callable[[GroupedRewards], Tensor]
"""`GroupedRewards` → advantages [E], float64. An episode's segments all get the episode's advantage."""

ADVANTAGES: Registry[Estimator] = Registry("advantage estimator", "penstock.trainer.advantages")
