"""Metrics of a sandbox server, for Prometheus. One registry per server: tests run several in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.common import Metrics
from penstock.sandbox.managed import CostGauges
from penstock.sandbox.protocol import RunResult, SandboxError
from penstock.sandbox.server.views import OverQuota


class SandboxMetrics(Metrics):
    def __init__(self) -> None:
        super().__init__("sandbox")
        self.boxes = self.gauge("boxes", "Boxes by state: given_out, warm", ["state"])
        self.waiting = self.gauge("waiting", "Sessions waiting for a free box")
        self._taken_boxes = self.counter("pool_boxes", "Boxes: taken_warm, taken_cold, stale, given_up", ["how"])
        self._counted: dict[str, int] = {}
        self.start_s = self.histogram(
            "start_seconds",
            "Until a session had its box, queue included",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
        )
        self.calls = self.counter("calls", "Calls by verb and outcome", ["verb", "outcome"])
        self.call_s = self.histogram("call_seconds", "Duration of calls", ["verb"])
        self.reaped = self.counter("reaped", "Sessions ended unused or too old")
        self.costs = CostGauges(self)

    @contextmanager
    def call(self, verb: str) -> Iterator[CallOutcome]:
        """Times a call and counts its outcome: ``ok``, a limit's name, ``refused`` or ``failed``."""
        outcome, started = CallOutcome(), time.monotonic()
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

    def count_boxes(self, totals: Mapping[str, int]) -> None:
        """Brings the counters up to the pool's totals."""
        for how, count in totals.items():
            self._taken_boxes.labels(how).inc(count - self._counted.get(how, 0))
            self._counted[how] = count


class CallOutcome:
    name = "ok"

    def note(self, result: RunResult) -> RunResult:
        self.name = result.limit or "ok"
        return result
