"""A worker's numbers as Prometheus sees them."""

from __future__ import annotations

import asyncio
import contextlib

from penstock.agent_loops import AgentConfig, Worker, WorkerJob
from penstock.testing import FakeClient
from penstock.transfer_queue import RunContext


async def test_episodes_calls_and_waits_are_counted(parts_of, queue_of, tasks_of, calling_policy, calculator):
    queue = queue_of(tasks_of(6))
    config = AgentConfig(concurrency=3, max_response_tokens=1000)
    client = FakeClient(calling_policy(), latency_s=0.01)
    parts = parts_of(queue, client, calculator, config=config)
    job = WorkerJob("w", RunContext(queue, model=""), config, client)
    task = asyncio.create_task(Worker(job, parts).run())
    value = job.metrics.registry.get_sample_value
    async with asyncio.timeout(60):
        while not value("penstock_agent_in_flight"):
            await asyncio.sleep(0.001)
        assert value("penstock_agent_concurrency_limit") == 3
        while len(queue.done) < 6 or not value("penstock_agent_waited_seconds_total", {"cause": "admission"}):
            await asyncio.sleep(0.005)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert value("penstock_agent_episodes_total", {"outcome": "completed"}) == 6
    assert value("penstock_agent_episode_seconds_count") == 6
    assert value("penstock_agent_model_call_seconds_count") == 12
    assert value("penstock_agent_model_call_seconds_sum") > 0
    assert value("penstock_agent_tool_call_seconds_count", {"tool": "calculator"}) == 6
    assert value("penstock_agent_reward_seconds_count") == 6
    assert value("penstock_agent_in_flight") == 0
