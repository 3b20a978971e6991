"""Admission and shipping: the two inequalities of `queue` as functions, and the checks of a run's limits.

A *due* is the last step that may train on a group (its oldest version + max_staleness). Steps below `next_step` are
fixed and have no free place, so an unshipped group finds G places in each step from `next_step` on.
The memory queue calls these functions; the part `admission` of `lua/shared_groups.lua` mirrors them.

`check_limits`, `check_quotas` and `check_step_bytes` reject, before a run starts, settings with which no step could
ever be filled; the error shows the calculation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from penstock.transfer_queue.errors import QueueError
from penstock.transfer_queue.types import Limits


def places(step: int, next_step: int, groups_per_step: int) -> int:
    """Returns the number of groups that can still ship at or before `step`."""
    return max(0, step - next_step + 1) * groups_per_step


def count_due(dues: Sequence[int], step: int) -> int:
    """Returns the number of `dues` at or before `step`."""
    return sum(due <= step for due in dues)


def may_admit(due: int, unshipped: Sequence[int], next_step: int, groups_per_step: int) -> bool:
    """Returns True if every group in the system can still ship in time after one more with `due` (EDF feasibility).

    `unshipped`: dues of groups that are admitted or ready. For all t ≥ due: #{dues ≤ t} < places(t).
    """
    last = max([due, *unshipped])
    return all(count_due(unshipped, t) < places(t, next_step, groups_per_step) for t in range(due, last + 1))


def may_ship(ended: Sequence[int], running: Sequence[int], step: int, groups_per_step: int) -> bool:
    """Returns True if a batch of `step` may leave groups with these dues: for all t ≥ step, #{≤ t} ≤ (t − step)·G.

    For t = step: no group that is due now may be left. If no group due by t is still running there is nothing to wait
    for; too many due at once occur only in a queue that has caught up with a checkpoint.
    """
    remaining = [*ended, *running]
    return all(
        count_due(remaining, t) <= (t - step) * groups_per_step or not count_due(running, t)
        for t in range(step, max([step, *remaining]) + 1)
    )


def room_allows(unconsumed: int, max_bytes: int, groups: int, max_groups: int, groups_per_step: int) -> bool:
    """Back-pressure with `groups` in the system. One step's worth of groups is always admitted; otherwise a full
    queue could never ship and never empty."""
    if groups < groups_per_step:
        return True
    return (max_groups == 0 or groups < max_groups) and unconsumed <= max_bytes


def enough_members(rewarded: int, group_size: int, min_group: int) -> bool:
    """Returns True if a group whose members have all ended is trained."""
    return rewarded >= min(min_group, group_size)


def roots_of(group_size: int, branches: int) -> int:
    """Returns the number of a training group's members that begin with its task; the others wait to be branches."""
    return -(-group_size // (branches + 1))


def most_together(losses: int) -> float:
    """Returns the most episodes that a worker may hold while it runs one that lost `losses` leases, itself counted.

    One loss restricts nothing: machines die. From the third on the episode runs alone, so the loss that makes it a
    dead letter (`Limits.max_lost_leases`) is its own.
    """
    return math.inf if losses < 2 else 8 if losses == 2 else 1


BYTES_PER_TOKEN = 9
"""Bytes of one response token: id 4, logprob 4, mask 1."""
FILTERS = ("none", "zero_variance")


def check_limits(limits: Limits) -> None:
    """Raise `QueueError` naming the invalid limit, with the calculation if no step could be filled."""
    least: dict[str, float] = dict.fromkeys(
        ("group_size", "groups_per_step", "min_group", "max_attempts", "max_bytes"), 1
    )
    least |= dict.fromkeys(("max_staleness", "branches", "max_groups", "max_filtered_steps"), 0)
    # The last of the leases must be lost alone, see `most_together`.
    least |= {"lease_ttl_s": 0.001, "max_lost_leases": 4}
    numbers = {name: (getattr(limits, name), low) for name, low in least.items()}
    numbers |= {f"quota of {source!r}": (quota, 1) for source, quota in limits.quotas.items()}
    for name, (value, low) in numbers.items():
        if value < low:
            raise QueueError(f"limits: {name} is {value}, it must be at least {low}")
    for name, choices in (("overage", ("wait", "mask", "drop")), ("filter_groups", FILTERS)):
        if getattr(limits, name) not in choices:
            raise QueueError(f"limits: {name} is {getattr(limits, name)!r}; one of {', '.join(choices)}")
    if 0 < limits.max_groups < limits.groups_per_step:
        raise QueueError(
            f"limits: max_groups = {limits.max_groups} < groups_per_step = {limits.groups_per_step}: a step could never"
            f" be filled; give at least {limits.groups_per_step}, or 0 for no limit"
        )
    if limits.branches >= limits.group_size:
        raise QueueError(
            f"limits: branches = {limits.branches} with group_size = {limits.group_size}: a root and its branches are"
            f" members of one group; give at most {limits.group_size - 1}"
        )
    if limits.filter_groups == "zero_variance" and limits.group_size < 2:
        raise QueueError("limits: filter_groups = zero_variance with group_size = 1 would filter every group")


def check_quotas(limits: Limits, sources: Collection[str]) -> None:
    """`sources`: every data_source of the dataset. Raises `QueueError` if the quotas together cannot fill a step.

    A source without a quota is unbounded and can fill any step.
    """
    if not sources or not set(sources) <= limits.quotas.keys():
        return
    parts = [f"{source} {limits.quotas[source]}" for source in sorted(set(sources))]
    total = sum(limits.quotas[source] for source in set(sources))
    if total < limits.groups_per_step:
        raise QueueError(
            f"quotas: {' + '.join(parts)} = {total} < groups_per_step = {limits.groups_per_step}: every data_source "
            f"has one and a step could never be filled. Raise them to {limits.groups_per_step} in sum, or leave one out"
        )


def check_step_bytes(limits: Limits, response_tokens: int, token_bytes: int = BYTES_PER_TOKEN) -> None:
    """`response_tokens`: maximum per episode; `token_bytes`: of one. Raises `QueueError` if a step's longest episodes
    exceed `max_bytes`."""
    groups, members = limits.groups_per_step, limits.group_size
    needed = groups * members * token_bytes * response_tokens
    if needed > limits.max_bytes:
        raise QueueError(
            f"max_bytes = {limits.max_bytes} < groups_per_step × group_size × bytes per token × response tokens = "
            f"{groups} × {members} × {token_bytes} × {response_tokens} = {needed}: one step may not fit. "
            f"Raise max_bytes to at least {needed}, or lower one of the factors"
        )
