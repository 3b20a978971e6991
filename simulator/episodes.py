"""Groups, their episodes, and the gate that admits them and picks the groups of a step.

The gate follows the queue's two rules, or verl's. Draws depend on the seed and the group's number alone, so they
are the same wherever and whenever a group runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.simulator.config import Simulation
from penstock.transfer_queue import may_ship


@dataclass(slots=True)
class SimulatedEpisode:
    group: Group
    tokens: float
    """Sampled tokens of all turns."""
    turns: int
    tool_s: list[float]
    """Tool seconds of each turn but the last."""
    versions: dict[int, float] = field(default_factory=dict)
    """Sampled tokens by the policy version that sampled them."""
    turn: int = 0


@dataclass(slots=True)
class Group:
    number: int
    admitted_at: int
    """The newest version that rollout servers had then; no token of the group is older."""
    episodes: list[SimulatedEpisode] = field(default_factory=list)
    running: int = 0

    def due(self, max_staleness: float) -> int:
        """Returns the last step that may train on the group."""
        return int(self.admitted_at + max_staleness)


def draw(config: Simulation, number: int, version: int) -> Group:
    """The group of this number: turns, tokens and tool times of each member."""
    random = np.random.default_rng([config.seed, number])
    size, most = config.group_size, int(np.ceil(config.work.turns))
    tokens = np.maximum(1.0, config.work.response.of(random.standard_normal(size)))
    turns = np.floor(config.work.turns + random.random(size)).astype(int).clip(1, most)
    tools = config.work.tool_s.of(random.standard_normal((size, most)))
    group = Group(number, version, running=size)
    group.episodes = [
        SimulatedEpisode(group, t, k, row[: k - 1])
        for t, k, row in zip(tokens.tolist(), turns.tolist(), tools.tolist(), strict=True)
    ]
    return group


def trained_tokens(config: Simulation, episode: SimulatedEpisode) -> float:
    """Returns the tokens that the trainer computes on: prompt, sampled tokens and observations."""
    return config.work.prompt_tokens + episode.tokens + (episode.turns - 1) * config.work.observation_tokens


def may_admit(config: Simulation, admitted: int, version: int) -> bool:
    """``admitted < (version + 1 + max_staleness) * groups_per_step``, `version` being what rollout servers have.

    The closed form of the queue's admission (`transfer_queue.may_admit`) for groups that arrive in order of
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
    taken, remaining = oldest_first[: config.groups_per_step], oldest_first[config.groups_per_step :]
    dues = [group.due(bound) for group in remaining]
    return taken if may_ship(dues, [group.due(bound) for group in running], step, config.groups_per_step) else None
