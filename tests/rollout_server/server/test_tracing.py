"""One trace over two processes' parts: who asks, and the server that answers."""

from __future__ import annotations

import pytest
from tests.rollout_server.conftest import rollout_server
from tests.until import until

from penstock.common import current_context, start_span, trace_headers
from penstock.common.tracing import install_tracer, use_span
from penstock.rollout_server import GenerateRequest, Sampling


@pytest.fixture
def collected():
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider

    provider, exporter = TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    install_tracer(provider.get_tracer("test"), {"penstock.run": "mine"})
    yield exporter
    install_tracer(None)
    provider.shutdown()


def ask(count: int = 4) -> GenerateRequest:
    return GenerateRequest(token_ids=[5, 6, 7], sampling=Sampling(max_new_tokens=count), episode_id="train/0#1")


@pytest.fixture(autouse=True)
async def server(queue, tmp_path):
    async with rollout_server(queue, tmp_path) as running:
        yield running


async def finished(collected, count: int):
    await until(lambda: len(collected.get_finished_spans()) == count)
    return {span.name: span for span in collected.get_finished_spans()}


async def test_the_servers_span_is_under_the_one_that_asked(collected, client) -> None:
    with use_span(start_span("generate", None)):
        await client.generate(ask())
    spans = await finished(collected, 2)
    asked, answered = spans["generate"], spans["sample"]
    assert answered.context.trace_id == asked.context.trace_id
    assert answered.parent.span_id == asked.context.span_id
    assert answered.kind.name == "SERVER"
    said = dict(answered.attributes)
    assert said["penstock.episode"] == "train/0#1"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 4)
    assert [said[f"penstock.{name}"] for name in ("version", "finish_reason", "server_name")] == [0, "length", "s0"]


async def test_answer_that_is_given_up_ends_its_span_which_without_a_caller_has_no_parent(
    collected, client, server
) -> None:
    server.engine.token_s = 0.05
    stream = client.stream(ask(400))
    await anext(stream)
    await stream.aclose()
    spans = await finished(collected, 1)
    assert spans["sample"].parent is None
    assert spans["sample"].attributes["penstock.finish_reason"] == "broken"


async def test_no_header_is_sent_where_spans_are_off() -> None:
    assert current_context() is None
    assert trace_headers(None) == {}
