from __future__ import annotations

import asyncio

from penstock.agent_loops import span
from penstock.agent_loops.tracing import begin_trace


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
