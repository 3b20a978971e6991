"""What an agent worker counts, in Prometheus' terms. One registry per worker: tests run several in one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="penstock", registry=registry)
        self.episodes = Counter("penstock_agent_episodes", "Episodes by how they ended", ["outcome"], registry=registry)
        self.episode_s = Histogram(
            "penstock_agent_episode_seconds", "From lease to the queue", buckets=SECONDS, registry=registry
        )
        self.model_s = Histogram(
            "penstock_agent_model_call_seconds", "Waiting for an answer", buckets=SECONDS, registry=registry
        )
        self.tool_s = Histogram(
            "penstock_agent_tool_call_seconds", "Tool calls by tool", ["tool"], buckets=SECONDS, registry=registry
        )
        self.reward_s = Histogram(
            "penstock_agent_reward_seconds", "Asking the reward", buckets=SECONDS, registry=registry
        )
        self.waited = Counter(
            "penstock_agent_waited_seconds", "Idle capacity, by its cause", ["cause"], registry=registry
        )
        self.in_flight = Gauge("penstock_agent_in_flight", "Episodes that run now", registry=registry)
        self.limit = Gauge("penstock_agent_concurrency_limit", "Most episodes at once, for now", registry=registry)
        self.lag_s = Gauge(
            "penstock_agent_loop_lag_seconds", "Longest time that code held the loop up lately", registry=registry
        )

    def span(self, kind: str, name: str, seconds: float) -> None:
        """One span of an episode, see `trace.py`."""
        if kind == "model":
            self.model_s.observe(seconds)
        elif kind == "tool":
            self.tool_s.labels(name).observe(seconds)
        elif kind == "reward":
            self.reward_s.observe(seconds)

    def follow(self, in_flight: Callable[[], int], limit: Callable[[], int]) -> None:
        """Read these two when somebody looks."""
        self.in_flight.set_function(in_flight)
        self.limit.set_function(limit)
