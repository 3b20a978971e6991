from __future__ import annotations

import pytest

from penstock.common import tracing
from penstock.common.tracing import (
    context_of,
    current_context,
    export_configured,
    export_spans,
    install_tracer,
    spans_on,
    start_span,
    trace_headers,
    use_span,
)

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


@pytest.fixture
def exporter():
    return memory.InMemorySpanExporter()


async def test_spans_nest_and_cross_processes(exporter) -> None:
    async with export_spans("agent", {"penstock.run": "mine"}, instance="agent-0", exporter=exporter):
        assert spans_on()
        with use_span(start_span("generate", None, {"episode": "e1", "none": None})) as outer:
            headers = trace_headers(current_context())
            assert headers == {"traceparent": outer.traceparent}
            with use_span(start_span("sample", context_of(headers["traceparent"]), server=True)) as inner:
                inner.note(output_tokens=4, path=pytest)
                inner.text(prompt="secret")
        assert current_context() is None
    assert not spans_on()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    outer_span, inner_span = spans["generate"], spans["sample"]
    assert inner_span.parent.span_id == outer_span.context.span_id
    assert inner_span.kind.name == "SERVER"
    assert dict(outer_span.attributes) == {"penstock.run": "mine", "penstock.episode": "e1"}
    assert inner_span.attributes["gen_ai.usage.output_tokens"] == 4
    assert inner_span.attributes["penstock.path"] == str(pytest)
    assert "penstock.prompt" not in inner_span.attributes
    assert outer_span.resource.attributes["service.name"] == "agent"
    assert outer_span.resource.attributes["service.instance.id"] == "agent-0"


async def test_text_is_cut_where_it_is_asked_for(exporter, monkeypatch) -> None:
    monkeypatch.setenv(tracing.TEXT_VARIABLE, "true")
    async with export_spans("agent", {}, instance="a", exporter=exporter):
        with use_span(start_span("generate", None)) as span:
            assert span.with_text
            span.text(prompt="x" * 40_000)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["penstock.prompt"] == "x" * tracing.MAX_TEXT_CHARS


async def test_an_exception_fails_the_span(exporter) -> None:
    async with export_spans("agent", {}, instance="a", exporter=exporter):
        with pytest.raises(ValueError, match="no"), use_span(start_span("tool", None)):
            raise ValueError("no")
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "ValueError: no")


async def test_nothing_without_a_collector(monkeypatch) -> None:
    for name in tracing.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    async with export_spans("agent", {}, instance="a"):
        assert not spans_on()
    install_tracer(None)
    assert (trace_headers(None), context_of(None), current_context()) == ({}, None, None)
    tracing.NO_SPAN.note(x=1)
    tracing.NO_SPAN.text(x="1")


@pytest.mark.parametrize(
    ("environment", "configured"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_export_configured(environment: dict[str, str], configured: bool) -> None:
    assert export_configured(environment) is configured
