"""Spans over real OTLP to a collector of our own, as the standard variables say."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.deploy import asked_for, spans_exported
from penstock.deploy import telemetry as spans_module
from penstock.rollout_server import tracing

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


async def test_a_collector_gets_the_spans_of_a_role(collector, monkeypatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    monkeypatch.setenv(ENDPOINT, url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    async with spans_exported("agent", "mine", "agent-0"):
        with tracing.inside(tracing.begin("episode", None, {"tokens": 5})):
            pass
    assert tracing.TRACING.tracer is None
    sent = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (resource,) = [one for request in sent for one in request.resource_spans]
    facts = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert facts["service.name"] == "penstock-agent"
    assert (facts["service.instance.id"], facts["penstock.run"]) == ("agent-0", "mine")
    ((span,),) = [scope.spans for scope in resource.scope_spans]
    assert span.name == "episode"


async def test_a_collector_that_is_away_holds_nobody_up(monkeypatch, caplog) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv(ENDPOINT, "http://192.0.2.1:4318")
    monkeypatch.setattr(spans_module, "FLUSH_S", 0.2)
    with caplog.at_level(logging.WARNING, "penstock"):
        async with spans_exported("agent", "mine", "agent-0"):
            with tracing.inside(tracing.begin("episode", None)):
                pass
    assert "the last spans were not sent" in caplog.text


async def test_without_the_extra_a_role_says_so_and_goes_on(monkeypatch, caplog) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")

    def absent(environment):
        raise ImportError("No module named 'opentelemetry.exporter'")

    monkeypatch.setattr(spans_module, "_otlp", absent)
    async with spans_exported("agent", "mine", "agent-0"):
        assert tracing.TRACING.tracer is None
    assert "pip install 'penstock[otel]'" in caplog.text


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_decide(environment, asked: bool) -> None:
    assert asked_for(environment) is asked
