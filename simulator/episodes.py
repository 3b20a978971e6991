"""Groups and their episodes. Draws depend on the seed and the group's number alone, not on when or where it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.simulator.config import Simulation


@dataclass(slots=True)
class Episode:
    group: Group
    tokens: float
    """Sampled tokens of all turns."""
    turns: int
    tool_s: list[float]
    """Of each turn but the last."""
    versions: dict[int, float] = field(default_factory=dict)
    """Sampled tokens by the policy version that sampled them."""
    turn: int = 0


@dataclass(slots=True)
class Group:
    number: int
    admitted_at: int
    """The newest version that rollout servers had then; no token of the group is older."""
    episodes: list[Episode] = field(default_factory=list)
    running: int = 0

    def due(self, max_staleness: float) -> int:
        """The last step that may train on it."""
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
        Episode(group, t, k, row[: k - 1])
        for t, k, row in zip(tokens.tolist(), turns.tolist(), tools.tolist(), strict=True)
    ]
    return group


def trained_tokens(config: Simulation, episode: Episode) -> float:
    """What the trainer computes on: prompt, sampled tokens and observations."""
    return config.work.prompt_tokens + episode.tokens + (episode.turns - 1) * config.work.observation_tokens
