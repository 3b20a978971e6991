"""The interface of environments, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

COMPONENT = "environment"
"""Component of an environment's failures in outcomes."""


@dataclass(frozen=True, slots=True)
class EnvStep:
    """Result of a reset or a step."""

    text: str
    """The observation, as the model reads it."""
    reward: float = 0.0
    terminated: bool = False
    """The environment's own end."""
    truncated: bool = False
    """A limit of the environment's, as its number of steps."""
    state: str = ""
    """Key of the state it is in, for estimators that compare turns of the same state."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the info."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """Entries that the settings show below the observation."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class InvalidAction(Exception):
    """The environment has no such action; it was not stepped. The message is for the model."""


class StepFailed(Exception):
    """`step` raised; the message says what. The environment cannot be stepped any more."""


class Environment(Protocol):
    """One episode's environment. `reset` once, then `step` until done; `close` however it ends."""

    async def reset(self, seed: int) -> EnvStep:
        """Raises `InfraFailure`."""

    async def step(self, action: str) -> EnvStep:
        """Raises `InvalidAction`, `StepFailed`, and `InfraFailure` if it is gone or late."""

    async def close(self) -> None:
        """Ends it with all it started. Never raises; safe to call twice, and during another call."""
