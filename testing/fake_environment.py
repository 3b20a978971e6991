"""An environment that counts its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.agent_loops.environments import EnvStep


class FakeEnvironment:
    """Counts: ends after `steps`, with a reward of 1 for each action ``good``."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.seed: int | None = None
        self.actions: list[str] = []
        self.closed = False
        self.options: Mapping[str, Any] = {}

    async def reset(self, seed: int) -> EnvStep:
        self.seed = seed
        return EnvStep(f"room {seed}", state=f"{seed}")

    async def step(self, action: str) -> EnvStep:
        self.actions.append(action)
        count = len(self.actions)
        return EnvStep(f"step {count}", float(action == "good"), count >= self.steps, state=f"{count}")

    async def close(self) -> None:
        self.closed = True
