"""Sums, means and deviations by group, without a loop over groups. Groups may have any number of members.

Also sums along the time of each episode, and groups of turns that answered the same state.
"""

from __future__ import annotations

from penstock.trainer.lazy_torch import Tensor, torch


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """values [M], index [M] in 0 … size − 1 → sums [size]"""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def places_of(group: Tensor) -> Tensor:
    """group [M] → [M] the place of each one's group in their order, from 0. `Tensor.unique` makes the host wait for the
    device, to hear how many groups there are."""
    order = group.argsort(stable=True)
    ordered = group[order]
    begins = torch.zeros_like(group)
    begins[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(group).index_copy(0, order, begins.cumsum(0))


def group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Return [M]: for each of the values [M] the sum over its group."""
    index = places_of(group)
    return sum_by(values, index, len(index))[index]


def add_at_last(target: Tensor, values: Tensor, index: Tensor) -> None:
    """target [N], index [N], values [M]: adds values[m] in place where m stands in `index` for the last time."""
    places = torch.arange(len(index))
    last = torch.full((len(values),), -1).scatter_reduce(0, index, places, "amax")
    there = last >= 0
    target[last[there]] += values[there]


def group_sizes(group: Tensor) -> Tensor:
    """group [M] → [M] the number of members of each one's group"""
    return group_sums(torch.ones_like(group), group)


def group_means(values: Tensor, group: Tensor, weights: Tensor | None = None) -> Tensor:
    """values [M] → [M] the (weighted) mean of each one's group"""
    if weights is None:
        return group_sums(values, group) / group_sizes(group)
    return group_sums(values * weights, group) / group_sums(weights, group)


def group_extremes(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """values [M] → (lowest, highest) of each one's group, [M] each"""
    index = places_of(group)
    lowest = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")
    highest = torch.full_like(values, -torch.inf).scatter_reduce(0, index, values, "amax")
    return lowest[index], highest[index]


def all_equal(values: Tensor, group: Tensor) -> Tensor:
    """Return [M] bool: True if all values of the member's group are equal; single members always are.

    Asked of the values themselves, not of their deviation: the mean of equal floats is not always that float.
    """
    lowest, highest = group_extremes(values, group)
    return lowest == highest


def centred(values: Tensor, group: Tensor) -> Tensor:
    """values [M] → [M] less the group's mean; exactly 0 where all of a group are equal."""
    return torch.where(all_equal(values, group), 0.0, values - group_means(values, group))


def best_and_worst(values: Tensor, group: Tensor, eligible: Tensor) -> tuple[Tensor, Tensor]:
    """All [M] → (partner, side) [M] int64: of each group the eligible members of highest and lowest value, the first of
    equals, are each other's partner and have side +1 and −1. Where all are equal, and for all others, side is 0."""
    partner, side = torch.arange(len(values)), torch.zeros(len(values), dtype=torch.long)
    for one in group.unique():
        members = torch.nonzero((group == one) & eligible).flatten()
        if not len(members):
            continue
        best, worst = members[values[members].argmax()], members[values[members].argmin()]
        if values[best] > values[worst]:
            partner[best], partner[worst] = worst, best
            side[best], side[worst] = 1, -1
    return partner, side


def standardised(values: Tensor, group: Tensor, epsilon: float) -> Tensor:
    """values [M] → [M] less the group's mean, over its standard deviation (n − 1) + epsilon."""
    shifted = centred(values, group)
    variance = group_means(shifted.square(), group) * group_sizes(group) / (group_sizes(group) - 1).clamp(min=1)
    return shifted / (variance.sqrt() + epsilon)


def discounted(rewards: Tensor, episode: Tensor, gamma: float) -> Tensor:
    """rewards [M] in order of time, episode [M] → G_m = r_m + γ · G_{m+1} within the episode, [M]"""
    zeros = torch.zeros_like(rewards)
    return gae_of(rewards, zeros, episode, gamma, 1.0)


def gae_of(rewards: Tensor, values: Tensor, episode: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """A_m = δ_m + γλ · A_{m+1} with δ_m = r_m + γ · V_{m+1} − V_m within each episode; all [M], λ a number or [M]."""
    goes_on = torch.zeros_like(rewards)
    goes_on[:-1] = (episode[1:] == episode[:-1]).to(rewards.dtype)
    following = values.roll(-1) * goes_on
    # A plain loop over floats: a step has some 10⁵ of them, and it is exact.
    advantages = (rewards + gamma * following - values).tolist()
    factors = (gamma * lam * goes_on).tolist()
    for index in reversed(range(len(advantages) - 1)):
        advantages[index] += factors[index] * advantages[index + 1]
    return torch.tensor(advantages, dtype=rewards.dtype)
