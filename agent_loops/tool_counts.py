"""Numbers and texts of one episode's tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.tools import ToolResult


@dataclass(slots=True)
class ToolCounts:
    calls: int = 0
    errors: int = 0
    reward: float = 0.0
    """Sum of `ToolResult.reward`."""
    texts: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums of `ToolResult.metrics`."""
    final_answer: str | None = None
    """Text of the last result that was `final`."""

    def add(self, results: Sequence[ToolResult]) -> None:
        """One turn's."""
        self.calls += len(results)
        self.errors += sum(result.is_error for result in results)
        self.reward += sum(result.reward or 0.0 for result in results)
        self.texts.extend(result.text for result in results)
        finals = [result.text for result in results if result.final]
        self.final_answer = finals[-1] if finals else self.final_answer
        for key, value in ((key, value) for result in results for key, value in result.metrics.items()):
            self.metrics[key] = self.metrics.get(key, 0.0) + float(value)
