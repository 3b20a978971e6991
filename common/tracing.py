"""OpenTelemetry spans; nothing at all, not even an import, if they are off.

    async with export_spans("agent", {"penstock.run": run}, instance=name):     once, at the start of a process
        if spans_on():
            with use_span(start_span("generate", current_context(), {"episode": episode_id})) as span:
                headers |= trace_headers(current_context())
                span.note(output_tokens=17)

The span around the running code is kept in a context variable of this module; OpenTelemetry's is set too, for spans of
users' own instrumented code. Attributes are ``penstock.NAME``, except those with a semantic convention (`GEN_AI`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)
TRACEPARENT = "traceparent"
MAX_TEXT_CHARS = 32_000
"""Longest prompt, answer or tool result in a span."""
GEN_AI = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "tool": "gen_ai.tool.name",
    "operation": "gen_ai.operation.name",
}
"""Names by OpenTelemetry's semantic conventions."""
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TEXT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""``true``: spans hold prompts, answers, tool arguments and results too."""
FLUSH_S = 5.0
"""A process that ends sends its last spans within this time or loses them."""


@dataclass(slots=True)
class _Tracing:
    tracer: Tracer | None = None
    """None: off."""
    common: Mapping[str, str] = field(default_factory=dict)
    """Attributes of every span."""
    with_text: bool = False


_TRACING = _Tracing()
_CURRENT: ContextVar[Context | None] = ContextVar("span around the running code", default=None)


def install_tracer(tracer: Tracer | None, common: Mapping[str, str] | None = None, *, with_text: bool = False) -> None:
    """Make spans with `tracer` from now on; None makes no more. `common` are attributes of every span."""
    _TRACING.tracer, _TRACING.common, _TRACING.with_text = tracer, dict(common or {}), with_text


def spans_on() -> bool:
    """Returns True if a tracer is installed."""
    return _TRACING.tracer is not None


# spans -------------------------------------------------------------------------------------------------------------
class OpenSpan:
    """A span that was started; `end` is its last call."""

    __slots__ = ("_span", "context")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self.context = context
        """Parent of spans under this one."""

    @property
    def with_text(self) -> bool:
        """True if spans hold texts."""
        return _TRACING.with_text

    @property
    def traceparent(self) -> str:
        """The W3C header value that names this span."""
        return trace_headers(self.context).get(TRACEPARENT, "")

    def note(self, **facts: Any) -> None:
        """Sets attributes; None is left out, and anything but numbers and strings is converted to a string."""
        self._span.set_attributes(_attributes(facts))

    def text(self, **texts: str) -> None:
        """Sets attributes, cut to `MAX_TEXT_CHARS`, where texts are asked for."""
        if _TRACING.with_text:
            self.note(**{name: value[:MAX_TEXT_CHARS] for name, value in texts.items()})

    def fail(self, cause: str) -> None:
        """Marks the span as failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, cause))

    def end(self, at_unix_ns: int | None = None) -> None:
        """Ends the span, now or at a time that has passed."""
        self._span.end(at_unix_ns)


class NoSpan:
    """Stands in for a span while spans are off."""

    with_text = False

    def note(self, **facts: Any) -> None:
        """Does nothing."""

    def text(self, **texts: str) -> None:
        """Does nothing."""


NO_SPAN = NoSpan()


def start_span(
    name: str, parent: Context | None, facts: Mapping[str, Any] | None = None, *, server: bool = False
) -> OpenSpan:
    """Starts a span under `parent`; None: the first of a trace. Only while a tracer is installed."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    assert _TRACING.tracer is not None, "spans are off"
    kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
    # An empty context, not None: with None a span open in OpenTelemetry's own context would become the parent.
    under = Context() if parent is None else parent
    attributes = {**_TRACING.common, **_attributes(facts or {})}
    span = _TRACING.tracer.start_span(name, context=under, kind=kind, attributes=attributes)
    return OpenSpan(span, trace.set_span_in_context(span, under))


@contextlib.contextmanager
def use_span(span: OpenSpan) -> Iterator[OpenSpan]:
    """The block runs under `span`, which ends with it; an exception marks it as failed."""
    from opentelemetry import context

    ours, theirs = _CURRENT.set(span.context), context.attach(span.context)
    try:
        yield span
    except BaseException as error:
        span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        context.detach(theirs)
        _CURRENT.reset(ours)
        span.end()


def current_context() -> Context | None:
    """Context of the span around the running code; None: there is none."""
    return _CURRENT.get()


# across processes --------------------------------------------------------------------------------------------------
def trace_headers(context: Context | None) -> dict[str, str]:
    """HTTP headers that carry `context` to another process; none for None."""
    if context is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context)
    return headers


def context_of(traceparent: str | None) -> Context | None:
    """The context that a ``traceparent`` header carries; None for none."""
    if not traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent})


# export ------------------------------------------------------------------------------------------------------------
def export_configured(environment: Mapping[str, str]) -> bool:
    """Returns True if OpenTelemetry's standard variables name a collector and do not switch spans off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in ENDPOINT_VARIABLES)


@contextlib.asynccontextmanager
async def export_spans(
    service: str, common: Mapping[str, str], *, instance: str, facts: Mapping[str, str] | None = None,
    exporter: SpanExporter | None = None,
) -> AsyncIterator[None]:  # fmt: skip
    """Exports this process's spans for the length of the block; does nothing where no collector is configured.

    Args:
        service: ``service.name`` where the environment names none.
        common: attributes of every span.
        instance: ``service.instance.id``, the name of this process.
        facts: further attributes of the resource.
        exporter: in place of the one that the environment names.
    """
    if exporter is None and not export_configured(os.environ):
        yield
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        chosen = exporter or _otlp(os.environ)
    except ImportError as error:
        logger.warning("no spans, although a collector is named: %s; pip install 'penstock[otel]'", error)
        yield
        return
    resource = {"service.instance.id": instance, **(facts or {})}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = service
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(chosen))
    with_text = os.environ.get(TEXT_VARIABLE, "").lower() == "true"
    install_tracer(provider.get_tracer("penstock"), common, with_text=with_text)
    try:
        yield
    finally:
        install_tracer(None)
        await _shut_down(provider.shutdown)


def _otlp(environment: Mapping[str, str]) -> SpanExporter:
    """HTTP unless gRPC is asked for, whose exporter is a separate package. Raises `ImportError`."""
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((environment[name] for name in variables if environment.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


async def _shut_down(shutdown: Callable[[], None]) -> None:
    """Shut down in a daemon thread: an unreachable collector must not delay the end of a process."""
    thread = threading.Thread(target=shutdown, name="last spans", daemon=True)
    thread.start()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + FLUSH_S
    while thread.is_alive() and loop.time() < deadline:  # noqa: ASYNC110 - a thread sets no event of a loop
        await asyncio.sleep(0.02)
    if thread.is_alive():
        logger.warning("the last spans were not sent within %.0f s", FLUSH_S)


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    known = ((GEN_AI.get(name) or f"penstock.{name}", value) for name, value in facts.items() if value is not None)
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in known}
