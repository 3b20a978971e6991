"""When a group may be admitted, and when a batch may ship: the two rules of `queue`, as numbers.

A *due* is the last step that may train on a group (its oldest version + max_staleness). Steps below `next_step` are
fixed and have no place left, so a group that is not shipped yet finds G places in each step from `next_step` on.
The memory queue calls these functions; `lua/parts/admission.lua` mirrors them.
"""

from __future__ import annotations

from collections.abc import Sequence


def places(step: int, next_step: int, groups_per_step: int) -> int:
    """How many groups can still ship at or before `step`."""
    return max(0, step - next_step + 1) * groups_per_step


def count_due(dues: Sequence[int], step: int) -> int:
    """How many of `dues` are at or before `step`."""
    return sum(due <= step for due in dues)


def may_admit(due: int, unshipped: Sequence[int], next_step: int, groups_per_step: int) -> bool:
    """Whether one more group with `due` leaves every group in the system able to ship in time (EDF feasibility).

    `unshipped`: dues of groups that are admitted or ready. For all t ≥ due: #{dues ≤ t} < places(t).
    """
    last = max([due, *unshipped])
    return all(count_due(unshipped, t) < places(t, next_step, groups_per_step) for t in range(due, last + 1))


def may_ship(ended: Sequence[int], running: Sequence[int], step: int, groups_per_step: int) -> bool:
    """Whether a batch of `step` may leave groups with these dues behind: for all t ≥ step, #{≤ t} ≤ (t − step)·G.

    At t = step this says that no group that is due now may stay behind. Where none that is due by t still runs there is
    nothing to wait for: that too many are due at once happens to a queue that has caught up with a checkpoint.
    """
    left = [*ended, *running]
    return all(
        count_due(left, t) <= (t - step) * groups_per_step or not count_due(running, t)
        for t in range(step, max([step, *left]) + 1)
    )


def room_allows(unconsumed: int, max_bytes: int, groups: int, max_groups: int, groups_per_step: int) -> bool:
    """Back-pressure, with `groups` in the system. One step's worth of groups is always admitted: else a full queue
    could never ship, nor empty."""
    if groups < groups_per_step:
        return True
    return (max_groups == 0 or groups < max_groups) and unconsumed <= max_bytes


def enough_members(rewarded: int, group_size: int, min_group: int) -> bool:
    """Whether a group whose members have all ended goes on to the trainer."""
    return rewarded >= min(min_group, group_size)
