"""The whole worker on real parts: tokenizer folder, bubblewrap, the python tool, a reward file beside the recipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil

import pytest

from penstock.agent_loops import AgentConfig, LoadError, TemplateError, WorkerJob, run_worker
from penstock.testing import FakeClient, FakeSandbox
from penstock.tools import ToolConfig
from penstock.transfer_queue import RunContext

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    last = solution_str.rsplit("The answer is ", 1)[-1]
    return {"score": float(last.startswith(ground_truth)), "tool_calls": extra_info["tool_calls"]}
"""


@pytest.fixture
def job_of(tmp_path, tokenizer_for, queue_of):
    def make(client, tasks, template="qwen2_5", model=None, **fields):
        tokenizer_for(template).save_pretrained(tmp_path / "model")
        (tmp_path / "judge.py").write_text(REWARD)
        plain = {
            "name": "test-worker",
            "run": RunContext(queue_of(tasks), model or str(tmp_path / "model"), recipe_dir=tmp_path),
            "config": AgentConfig(max_response_tokens=1000, reward="judge.py:compute_score", concurrency=4),
            "client": client,
            "tools": [ToolConfig(name="python")],
        }
        return WorkerJob(**{**plain, **fields})

    return make


def python_call(code: str) -> str:
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


@pytest.mark.bwrap
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
async def test_python_in_a_box_answers_and_remembers(job_of, tasks_of, chat_for):
    chat = chat_for()
    script = [python_call("x = 12 + 34"), python_call("print(x)"), "The answer is 46.<|im_end|>"]

    def policy(context):
        return chat.encode(script[chat.decode(context).count("<|im_start|>user\n<tool_response>")])

    job = job_of(FakeClient(policy), tasks_of(4))
    worker = asyncio.create_task(run_worker(job))
    async with asyncio.timeout(200):
        while len(job.run.queue.done) < 4 and not worker.done():
            await asyncio.sleep(0.02)
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker
    assert job.run.queue.failed == []
    for trajectory in job.run.queue.done.values():
        assert trajectory.reward == 1.0
        assert trajectory.extra["tool_results"][1] == "46"
        assert trajectory.metrics["reward/tool_calls"] == 2.0


async def test_a_bad_recipe_is_refused_before_anything_is_leased(job_of, tasks_of):
    unused = FakeClient(lambda context: [2])
    with pytest.raises(TemplateError, match="no tokenizer in '/nowhere'"):
        await run_worker(job_of(unused, tasks_of(), model="/nowhere", tools=[]))
    with pytest.raises(LoadError, match="did you mean 'tool_agent'"):
        await run_worker(job_of(unused, tasks_of(), config=AgentConfig(loop="tool_agnt"), tools=[]))
    recorded = AgentConfig(loop="command", settings={"command": "a"}, forks={"branches": 1})
    with pytest.raises(LoadError, match=r"agent\.forks: command keeps more than the journal"):
        await run_worker(job_of(unused, tasks_of(), config=recorded, tools=[]))
    with pytest.raises(LoadError, match=r"no file 'reward\.py'"):
        await run_worker(job_of(unused, tasks_of(), config=AgentConfig(reward="reward.py:f"), tools=[]))


async def test_a_part_that_does_not_close_leaves_no_box(job_of, tasks_of, monkeypatch):
    """Boxes of a provider cost by the second, until their age ends them."""
    closed = []

    async def close(sandbox):
        closed.append(sandbox)

    async def stuck(reward):
        raise TimeoutError("a grader does not end")

    monkeypatch.setattr(FakeSandbox, "close", close)
    monkeypatch.setattr("penstock.agent_loops.worker.make_sandbox", lambda *_, **__: FakeSandbox())
    monkeypatch.setattr("penstock.agent_loops.rewards.registry.RewardFunction.close", stuck)
    worker = asyncio.create_task(run_worker(job_of(FakeClient(lambda context: [2], version=None), tasks_of())))
    await asyncio.sleep(0)
    while not any(task.get_name() == "usage" for task in asyncio.all_tasks()) and not worker.done():
        await asyncio.sleep(0.01)
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        await worker
    assert len(closed) == 1
