"""Counts of an agent worker: `WorkerMetrics` for Prometheus, `WorkerStats` for its log and its decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.common import Metrics
from penstock.sandbox.managed import CostGauges
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class WorkerMetrics(Metrics):
    """One registry per worker: tests run several in one process."""

    def __init__(self) -> None:
        super().__init__("agent")
        self.episodes = self.counter("episodes", "Episodes by how they ended", ["outcome"])
        self.episode_s = self.histogram("episode_seconds", "From lease to the queue", buckets=SECONDS)
        self.model_s = self.histogram("model_call_seconds", "Waiting for an answer", buckets=SECONDS)
        self.tool_s = self.histogram("tool_call_seconds", "Tool calls by tool", ["tool"], buckets=SECONDS)
        self._tool_s: dict[str, Any] = {}
        """`tool_s` by tool; looking a label up costs more than the observation."""
        self.reward_s = self.histogram("reward_seconds", "Computing the reward", buckets=SECONDS)
        self.waited = self.counter("waited_seconds", "Idle capacity, by its cause", ["cause"])
        self.in_flight = self.gauge("in_flight", "Episodes that run now")
        self.limit = self.gauge("concurrency_limit", "Current limit of episodes at once")
        self.lag_s = self.gauge("loop_lag_seconds", "Longest recent delay of the event loop")
        self.costs = CostGauges(self)

    def span(self, kind: str, name: str, seconds: float) -> None:
        """Observes one span of an episode, see `tracing`."""
        if kind == "model":
            self.model_s.observe(seconds)
        elif kind == "tool":
            if name not in self._tool_s:
                self._tool_s[name] = self.tool_s.labels(name)
            self._tool_s[name].observe(seconds)
        elif kind == "reward":
            self.reward_s.observe(seconds)

    def follow(self, in_flight: Callable[[], int], limit: Callable[[], int]) -> None:
        """Sets the functions that are read at each scrape."""
        self.in_flight.set_function(in_flight)
        self.limit.set_function(limit)


@dataclass(slots=True)
class WorkerStats:
    """Since the start: `outcomes`, `failures_in_a_row`. Since the last report: `waits_s`, latencies."""

    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    """The same for Prometheus."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures_in_a_row: int = 0
    last_failure: Outcome = COMPLETED
    waits_s: dict[str, float] = field(default_factory=dict)
    """cause → seconds of idle capacity: a worker half idle for 2 s waited 1 s."""
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
