"""What a sandbox server counts, in Prometheus' terms. One registry per server: tests run several in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from penstock.sandbox.protocol import RunResult, SandboxError
from penstock.sandbox.server.errors import OverQuota

START_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="penstock", registry=self.registry)
        self.boxes = Gauge(
            "penstock_sandbox_boxes", "Boxes by what they do: given_out, warm", ["state"], registry=self.registry
        )
        self.waiting = Gauge("penstock_sandbox_waiting", "Sessions waiting for a free box", registry=self.registry)
        self._taken = Counter(
            "penstock_sandbox_pool_boxes",
            "Boxes: taken_warm, taken_cold, stale, given_up",
            ["how"],
            registry=self.registry,
        )
        self._counted: dict[str, int] = {}
        self.start_s = Histogram(
            "penstock_sandbox_start_seconds",
            "Until a session had its box, queue included",
            buckets=START_BUCKETS_S,
            registry=self.registry,
        )
        self.calls = Counter(
            "penstock_sandbox_calls", "Calls by verb and how they ended", ["verb", "outcome"], registry=self.registry
        )
        self.call_s = Histogram("penstock_sandbox_call_seconds", "Duration of calls", ["verb"], registry=self.registry)
        self.reaped = Counter("penstock_sandbox_reaped", "Sessions ended unused or too old", registry=self.registry)

    @contextmanager
    def call(self, verb: str) -> Iterator[_Outcome]:
        """Times a call and counts its outcome: ``ok``, a limit's name, ``refused`` or ``failed``."""
        outcome, started = _Outcome(), time.monotonic()
        try:
            yield outcome
        except OverQuota:
            outcome.name = "refused"
            raise
        except SandboxError:
            outcome.name = "failed"
            raise
        finally:
            self.calls.labels(verb, outcome.name).inc()
            self.call_s.labels(verb).observe(time.monotonic() - started)

    def count_boxes(self, so_far: Mapping[str, int]) -> None:
        """What the pool has counted up to now."""
        for how, count in so_far.items():
            self._taken.labels(how).inc(count - self._counted.get(how, 0))
            self._counted[how] = count

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Outcome:
    name = "ok"

    def note(self, result: RunResult) -> RunResult:
        self.name = result.limit or "ok"
        return result
