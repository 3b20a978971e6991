"""What a reward is: an answer in, a number out. A failure of the machinery is raised, never a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.sandbox import Sandbox

Value = float | Mapping[str, Any]
"""A finite number, or a mapping with ``score``; its other numbers become metrics."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is scored; the first four are verl's `compute_score` arguments."""

    data_source: str
    solution: str
    """Text of the last segment's response, special tokens left out."""
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    """The task's prompt."""


class BaseReward(ABC):
    """One object per agent worker, asked by all its episodes at once; made with the recipe's settings as keywords."""

    needs_sandbox: bool = False

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox

    @abstractmethod
    async def score(self, answer: Answer) -> Value:
        """Raises `InfraFailure`, or anything else, where the machinery failed; cancelled at its deadline."""

    async def close(self) -> None:
        """Give back processes and connections; awaited once, when its worker ends."""
