"""What a worker counts between two reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.agent_loops.metrics import WorkerMetrics
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind


@dataclass(slots=True)
class WorkerStats:
    """Ever: `outcomes`, `failures_in_a_row`. Since the last report: `waits_s`, latencies."""

    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    """The same for Prometheus."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures_in_a_row: int = 0
    last_failure: Outcome = COMPLETED
    waits_s: dict[str, float] = field(default_factory=dict)
    """cause → seconds of idle capacity: a worker that is half idle for 2 s waited 1 s."""
    _latency_s: float = 0.0
    _ended: int = 0

    def add_episode(self, outcome: Outcome, latency_s: float) -> None:
        self.outcomes[outcome.kind.value] += 1
        self._latency_s += latency_s
        self._ended += 1
        self.metrics.episodes.labels(outcome.kind.value).inc()
        self.metrics.episode_s.observe(latency_s)
        if outcome.kind is OutcomeKind.INFRA_ERROR:
            self.failures_in_a_row += 1
            self.last_failure = outcome
        elif outcome.may_carry_reward:
            self.failures_in_a_row = 0

    def add_wait(self, cause: str, seconds: float) -> None:
        self.waits_s[cause] = self.waits_s.get(cause, 0.0) + seconds
        self.metrics.waited.labels(cause).inc(seconds)

    def take_waits(self) -> dict[str, float]:
        waits, self.waits_s = self.waits_s, {}
        return waits

    def line(self, in_flight: int) -> str:
        """One line for the log; starts a new interval of latencies."""
        mean_s = self._latency_s / self._ended if self._ended else 0.0
        ended, self._ended, self._latency_s = self._ended, 0, 0.0
        ever = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common()) or "none yet"
        return f"{ended} episodes ended (mean {mean_s:.2f} s), {in_flight} in flight; ever: {ever}"
