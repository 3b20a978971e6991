"""When a group is admitted and which groups a step takes: the queue's two rules, or verl's, on simulated groups."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.simulator.config import Simulation
from penstock.simulator.episodes import Group
from penstock.transfer_queue import may_ship


def may_admit(config: Simulation, admitted: int, version: int) -> bool:
    """``admitted < (version + 1 + max_staleness) * groups_per_step``, `version` being what rollout servers have.

    The closed form of the queue's admission (`transfer_queue.arithmetic.may_admit`) for groups that arrive in order of
    their versions; a test holds the two against each other. AReaL (arXiv:2505.24298, eq. 3) paces by the same
    formula, and verl's staleness_threshold is its fraction.
    """
    return admitted < (version + 1 + config.max_staleness) * config.groups_per_step


def take(config: Simulation, ready: Sequence[Group], running: Sequence[Group], step: int) -> list[Group] | None:
    """The groups that the next part of `step` trains on; None while there is something to wait for.

    bounded: a whole step's groups, oldest due first, if what stays behind can still ship in time. first_ready: a part's
    worth, in the order in which they ended.
    """
    if config.shipping == "first_ready":
        part = config.groups_per_step // config.trainer.chunks
        return list(ready[:part]) if len(ready) >= part else None
    if len(ready) < config.groups_per_step:
        return None
    bound = config.max_staleness
    oldest_first = sorted(ready, key=lambda group: (group.due(bound), group.number))
    taken, left = oldest_first[: config.groups_per_step], oldest_first[config.groups_per_step :]
    dues = [group.due(bound) for group in left]
    return taken if may_ship(dues, [group.due(bound) for group in running], step, config.groups_per_step) else None
