"""Metrics of a service for Prometheus: of the trainer's process and of the API's."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import Metrics
from penstock.transfer_queue import ClientRequest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class ServiceMetrics(Metrics):
    """Requests that the trainer's process runs. Results that it finds after a restart are not counted again."""

    def __init__(self) -> None:
        super().__init__("service")
        text = "From acceptance of a request to its start"
        self._wait_s = self.histogram("wait_seconds", text, ["owner", "kind"], buckets=SECONDS)
        self._request_s = self.histogram("request_seconds", "Running a request", ["kind"], buckets=SECONDS)
        self._requests = self.counter("requests", "Requests by how they ended", ["owner", "kind", "outcome"])
        self.samples = self.counter("samples", "Sequences sampled", ["owner"])
        self.tokens = self.counter("tokens", "Tokens: trained, scored, prompt, sampled", ["owner", "use"])
        self.adapters = self.gauge("adapters", "Models in the trainer's memory")

    def started(self, request: ClientRequest) -> float:
        """Observes the wait of a request that starts now; returns what `ended` takes."""
        self._wait_s.labels(request.owner, request.kind).observe(max(0.0, time.time() - request.accepted))
        return time.monotonic()

    def ended(self, request: ClientRequest, outcome: str, began: float) -> None:
        """Counts a request that has its result. `outcome`: ``done``, or whose fault it failed by."""
        self._request_s.labels(request.kind).observe(time.monotonic() - began)
        self._requests.labels(request.owner, request.kind, outcome).inc()


class ApiMetrics(Metrics):
    """Calls that the API refuses."""

    def __init__(self) -> None:
        super().__init__("api")
        self.refusals = self.counter("refusals", "Calls that were refused, by cause", ["cause"])


class CountRefusals:
    """ASGI layer: counts refusals by their status. A 429 is counted where its cause is known."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self.app, self._refusals = app, metrics.refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        causes = {401: "key", 404: "unknown", 413: "size", 415: "encoding"}

        async def counted(message: Message) -> None:
            status = message.get("status", 200)
            if status >= 400 and status not in (408, 429):
                self._refusals.labels(causes.get(status, "request" if status < 500 else "mistake")).inc()
            await send(message)

        await self.app(scope, receive, counted)
