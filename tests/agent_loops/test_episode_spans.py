"""An episode's spans as a collector gets them: who is under whom, what they say, and nothing where they are off."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from penstock.agent_loops import Episode
from penstock.agent_loops.usage import WorkerUsage, observed
from penstock.common.tracing import install_tracer
from penstock.testing import FakeClient, FakeSandbox
from penstock.tools import BaseTool, ToolResult

ANSWER = "The answer is 46."


@pytest.fixture
def collected(request):
    """Spans in the order of their ends; ``parametrize(indirect)`` with True: with texts."""
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider

    provider, exporter = TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    with_text = getattr(request, "param", False)
    install_tracer(provider.get_tracer("test"), {"penstock.run": "mine"}, with_text=with_text)
    yield exporter
    install_tracer(None)
    provider.shutdown()


@pytest.fixture
def run(queue_of, tasks_of, parts_of, calling_policy):
    async def go(tool=None, client=None, **fields):
        queue = queue_of(tasks_of())
        parts = parts_of(queue, client or FakeClient(calling_policy(), version=3), tool, **fields)
        outcome = await Episode(parts, queue.lease(tasks_of()[0])).run()
        return outcome, queue.done.get("train/00000000")

    return go


def tree(spans) -> dict[str, list[str]]:
    """name → names of the spans under it, in the order of their starts"""
    names = {span.context.span_id: span.name for span in spans}
    made: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: span.start_time):
        parent = names[span.parent.span_id] if span.parent else ""
        number = span.attributes.get("penstock.turn")
        made.setdefault(parent, []).append(span.name if number is None else f"turn {number}")
    return made


async def test_an_episode_is_a_tree_of_turns(run, collected, calculator) -> None:
    outcome, trajectory = await run(calculator)
    spans = collected.get_finished_spans()
    assert tree(spans) == {
        "": ["episode"],
        "episode": ["turn 0", "turn 1", "reward"],
        "turn": ["generate", "tool calculator", "generate"],
    }
    assert len({span.context.trace_id for span in spans}) == 1
    root = spans[-1]
    facts = {"penstock.episode": "train/00000000#0", "penstock.task": "train/00000000", "penstock.run": "mine"}
    assert all(facts.items() <= dict(span.attributes).items() for span in spans)
    assert root.attributes["penstock.outcome"] == outcome.kind.value == "completed"
    assert (root.attributes["penstock.reward"], root.attributes["penstock.version"]) == (1.0, 3)
    assert root.attributes["gen_ai.usage.output_tokens"] == trajectory.num_sampled
    first = next(span for span in spans if span.name == "generate")
    assert first.attributes["gen_ai.usage.input_tokens"] == len(trajectory.segments[0].prompt_ids)
    assert (first.attributes["penstock.version"], first.attributes["penstock.finish_reason"]) == (3, "stop")
    tool = next(span for span in spans if span.name == "tool calculator")
    assert tool.attributes["gen_ai.tool.name"] == "calculator"
    named = f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}"
    assert trajectory.extra["traceparent"].rpartition("-")[0] == named


async def test_a_turn_ends_with_the_last_thing_in_it(run, collected, calculator) -> None:
    await run(calculator)
    spans = collected.get_finished_spans()
    turns = [span for span in spans if span.name == "turn"]
    for turn in turns:
        inside = [span for span in spans if span.parent and span.parent.span_id == turn.context.span_id]
        assert turn.start_time <= min(span.start_time for span in inside)
        assert turn.end_time >= max(span.end_time for span in inside)
    assert turns[0].end_time <= turns[1].start_time


@pytest.mark.parametrize(("collected", "told"), [(False, False), (True, True)], indirect=["collected"])
async def test_texts_are_there_only_where_asked_for(run, collected, calculator, told: bool) -> None:
    await run(calculator)
    said = [str(value) for span in collected.get_finished_spans() for value in span.attributes.values()]
    assert any(ANSWER in value for value in said) is told
    assert any("12+34" in value for value in said) is told


class Boxed(BaseTool):
    name = "calculator"
    description = "Works in a box."
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}  # noqa: RUF012

    async def create(self, task):
        return await observed(FakeSandbox(), WorkerUsage("agent-0")).start("test")

    async def execute(self, state, arguments):
        result = await state.run_python("print(46)")
        return ToolResult(result.stdout)

    async def release(self, state):
        await state.close()


async def test_a_sandbox_is_under_its_tool(run, collected) -> None:
    await run(Boxed())
    made = tree(collected.get_finished_spans())
    assert made["tool calculator"] == ["sandbox run_python"]


async def test_an_infrastructure_failure_is_an_error_and_says_whose(run, collected) -> None:
    class Broken(FakeClient):
        async def generate(self, request):
            raise RuntimeError("no server")

    await run(client=Broken(lambda context: [2]))
    spans = {span.name: span for span in collected.get_finished_spans()}
    assert not spans["episode"].status.is_ok
    assert spans["episode"].attributes["penstock.component"] == "rollout"
    assert "no server" in spans["generate"].status.description


async def test_a_stopped_episode_ends_its_spans(run, collected, calculator) -> None:
    calculator.delay_s = 30
    task = asyncio.create_task(run(calculator))
    async with asyncio.timeout(60):
        await calculator.entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    spans = {span.name: span for span in collected.get_finished_spans()}
    assert {"episode", "turn", "generate", "tool calculator"} <= set(spans)
    assert spans["episode"].status.description == "stopped"


async def test_branches_have_turns_of_their_own(collected, queue_of, tasks_of) -> None:
    from penstock.agent_loops import span
    from penstock.agent_loops.tracing import begin_trace, episode_spans

    async def branch(name: str) -> None:
        for _ in range(2):
            with span("model"):
                await asyncio.sleep(0.001)
            with span("tool", name):
                await asyncio.sleep(0.001)

    spans = episode_spans(queue_of(tasks_of()).lease(tasks_of()[0]), "w")
    begin_trace(exported=spans)
    with span("model"):
        pass
    with span("tool", "delegate"):
        await asyncio.gather(branch("a"), branch("b"))
    spans.end()
    found = collected.get_finished_spans()
    turns = {one.context.span_id: one for one in found if one.name == "turn"}
    assert len(turns) == 5
    under: dict[int, list[str]] = {}
    for one in found:
        if one.parent and one.parent.span_id in turns:
            under.setdefault(one.parent.span_id, []).append(one.name)
    assert sorted(under.values()) == [
        *(["generate", "tool a"], ["generate", "tool a"], ["generate", "tool b"], ["generate", "tool b"]),
        ["generate", "tool delegate"],
    ]
    delegate = next(one for one in found if one.name == "tool delegate")
    assert turns[delegate.parent.span_id].end_time >= delegate.end_time


async def test_off_means_off(run, calculator) -> None:
    _, trajectory = await run(calculator)
    assert "traceparent" not in trajectory.extra


def test_off_imports_nothing() -> None:
    """Nothing of ours does; FastAPI and redis-py take OpenTelemetry's API by themselves."""
    code = (
        "import sys; sys.modules.update({'opentelemetry': None});"
        "import penstock.agent_loops.episode, penstock.rollout_server.client.client, penstock.deploy.telemetry.metrics"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
