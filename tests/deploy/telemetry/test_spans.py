"""Spans over real OTLP to a collector of our own, as the standard variables say."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.common import spans_on, start_span, tracing
from penstock.common.tracing import use_span
from penstock.deploy.telemetry.metrics import with_spans

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def collector():
    """(URL, bodies of the requests it got)"""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Nothing to standard error."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    server.server_close()


async def one_episode() -> None:
    with use_span(start_span("episode", None, {"tokens": 5})):
        pass


async def test_spans_reach_the_collector(collector, monkeypatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    monkeypatch.setenv(ENDPOINT, url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    await with_spans("agent", "mine", "agent-0", one_episode())
    assert not spans_on()
    sent = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (resource,) = [one for request in sent for one in request.resource_spans]
    facts = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert facts["service.name"] == "penstock-agent"
    assert (facts["service.instance.id"], facts["penstock.run"]) == ("agent-0", "mine")
    ((span,),) = [scope.spans for scope in resource.scope_spans]
    assert span.name == "episode"


async def test_spans_unreachable_collector_delays_nothing(monkeypatch, caplog) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv(ENDPOINT, "http://192.0.2.1:4318")
    monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
    with caplog.at_level(logging.WARNING, "penstock"):
        await with_spans("agent", "mine", "agent-0", one_episode())
    assert "the last spans were not sent" in caplog.text


async def test_spans_without_the_extra_are_off(monkeypatch, caplog) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")

    def absent(environment):
        raise ImportError("No module named 'opentelemetry.exporter'")

    monkeypatch.setattr(tracing, "_otlp", absent)
    seen = []

    async def work() -> None:
        seen.append(spans_on())

    await with_spans("agent", "mine", "agent-0", work())
    assert seen == [False]
    assert "pip install 'penstock[otel]'" in caplog.text
