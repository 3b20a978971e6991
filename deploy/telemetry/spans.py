"""OpenTelemetry's SDK for one role, as its standard environment variables say. Off where they name no collector.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 penstock run RECIPE

Text of prompts, answers and tools: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from penstock.rollout_server import install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TEXT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_S = 5.0
"""What a role that ends has not sent by then is lost."""


def asked_for(environment: Mapping[str, str]) -> bool:
    """Whether a collector is named, and spans are not switched off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in ENDPOINTS)


@contextlib.asynccontextmanager
async def spans_exported(role: str, run: str, name: str, exporter: SpanExporter | None = None) -> AsyncIterator[None]:
    """Spans of this process for the length of the block; nothing where none are asked for.

    `exporter` in place of the one that the environment names.
    """
    if exporter is None and not asked_for(os.environ):
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
    facts = {"service.instance.id": name, "penstock.run": run, "penstock.role": role}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        facts["service.name"] = f"penstock-{role}"
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(chosen))
    with_text = os.environ.get(TEXT_VARIABLE, "").lower() == "true"
    install(provider.get_tracer("penstock"), {"penstock.run": run}, with_text=with_text)
    try:
        yield
    finally:
        install(None)
        await _shut_down(provider.shutdown)


async def with_spans(role: str, run: str, name: str, work: Awaitable[None]) -> None:
    """`work`, its spans exported meanwhile."""
    async with spans_exported(role, run, name):
        await work


def _otlp(environment: Mapping[str, str]) -> SpanExporter:
    """Raises `ImportError`. HTTP unless gRPC is asked for, whose exporter is a package of its own."""
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()


async def _shut_down(shutdown: Callable[[], None]) -> None:
    """In a daemon thread: a collector that is away must not hold a role up."""
    thread = threading.Thread(target=shutdown, name="last spans", daemon=True)
    thread.start()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + FLUSH_S
    while thread.is_alive() and loop.time() < deadline:  # noqa: ASYNC110 - a thread sets no event of a loop
        await asyncio.sleep(0.02)
    if thread.is_alive():
        logger.warning("the last spans were not sent within %.0f s", FLUSH_S)
