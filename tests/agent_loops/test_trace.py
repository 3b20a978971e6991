from __future__ import annotations

import asyncio

from penstock.agent_loops import Episode, span
from penstock.agent_loops.tracing import begin_trace
from penstock.testing import FakeClient


async def test_episode_spans_in_its_trajectory(queue_of, tasks_of, parts_of, calling_policy, calculator):
    queue = queue_of(tasks_of())
    await Episode(parts_of(queue, FakeClient(calling_policy()), calculator), queue.lease(tasks_of()[0])).run()
    trajectory = queue.done["train/00000000"]
    spans = trajectory.extra["trace"]
    assert [span[:2] for span in spans] == [["model", ""], ["tool", "calculator"], ["model", ""], ["reward", ""]]
    assert [span[2] for span in spans] == sorted(span[2] for span in spans)


async def test_spans_belong_to_the_episode_of_their_task():
    async def episode(name):
        trace = begin_trace()
        with span("tool", name):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(timed(name) for _ in range(2)))
        return trace

    async def timed(name):
        with span("model", name):
            await asyncio.sleep(0)

    one, other = await asyncio.gather(episode("a"), episode("b"))
    assert [span[1] for span in one.spans] == ["a"] * 3
    assert [span[1] for span in other.spans] == ["b"] * 3


async def test_trace_keeps_256_spans_and_counts_the_rest():
    trace = begin_trace()
    for _ in range(259):
        with span("model"):
            pass
    assert (len(trace.plain()["trace"]), trace.plain()["trace_dropped"]) == (256, 3)
