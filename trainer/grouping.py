"""Sums, means and deviations by group, without a loop over groups. Groups may have any number of members."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """values [M], index [M] in 0 … size − 1 → sums [size]"""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def add_at_last(target: Tensor, values: Tensor, index: Tensor) -> None:
    """target [N], index [N], values [M]: adds values[m] in place where m stands in `index` for the last time."""
    places = torch.arange(len(index))
    last = torch.full((len(values),), -1).scatter_reduce(0, index, places, "amax")
    there = last >= 0
    target[last[there]] += values[there]


def group_sizes(group: Tensor) -> Tensor:
    """group [M] → [M] the number of members of each one's group"""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    return counts[index]


def group_means(values: Tensor, group: Tensor, weights: Tensor | None = None) -> Tensor:
    """values [M] → [M] the (weighted) mean of each one's group"""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    if weights is None:
        return (sum_by(values, index, len(counts)) / counts)[index]
    total = sum_by(weights, index, len(counts))
    return (sum_by(values * weights, index, len(counts)) / total)[index]


def group_extremes(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """values [M] → (lowest, highest) of each one's group, [M] each"""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    lowest = torch.full((len(counts),), torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")
    highest = torch.full((len(counts),), -torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amax")
    return lowest[index], highest[index]


def all_equal(values: Tensor, group: Tensor) -> Tensor:
    """values [M] → [M] bool, True where all of the group are equal, single members among them.

    Asked of the values themselves, not of their deviation: the mean of equal floats is not always that float.
    """
    lowest, highest = group_extremes(values, group)
    return lowest == highest


def centred(values: Tensor, group: Tensor) -> Tensor:
    """values [M] → [M] less the group's mean; exactly 0 where all of a group are equal."""
    return torch.where(all_equal(values, group), 0.0, values - group_means(values, group))


def standardised(values: Tensor, group: Tensor, epsilon: float) -> Tensor:
    """values [M] → [M] less the group's mean, over its standard deviation (n − 1) + epsilon."""
    shifted = centred(values, group)
    variance = group_means(shifted.square(), group) * group_sizes(group) / (group_sizes(group) - 1).clamp(min=1)
    return shifted / (variance.sqrt() + epsilon)
