"""kill -9 of a worker that runs an agent with an OpenAI client: another resumes from the journal, token for token."""

from __future__ import annotations

import pytest
from tests.agent_loops.kill.conftest import stop

from penstock.transfer_queue import JournalKind

pytestmark = [pytest.mark.redis, pytest.mark.crash, pytest.mark.deep]
EPISODES = 8
LINES = ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>', "The answer is 46."]
AGENT = """
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


async def solve(client, task):
    messages = list(task.messages)
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return float(task.ground_truth in message.content)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "46"} for call in message.tool_calls]
"""


async def test_killed_openai_agent_resumes_from_recorded_ids(stage, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(AGENT)
    hold = tmp_path / "hold"
    hold.touch()
    await stage.submit(EPISODES)
    given = {"episodes": EPISODES, "lines": LINES, "loop": "agent.py:solve", "hold": str(hold)}
    first = stage.worker("first", **given)
    entries = await stage.journaled(EPISODES, JournalKind.SAMPLED)
    first.kill()
    first.wait()
    hold.unlink()
    second = stage.worker("second", **given)
    trajectories = await stage.finished(EPISODES)
    stop(second)
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        (entry,) = entries[trajectory.episode_id]
        start, then = segment.turn_starts.tolist()
        assert segment.response_ids[start : start + len(entry.ids)].tolist() == entry.ids.tolist()
        assert segment.response_mask[start : start + len(entry.ids)].all()
        assert entry.context_len == len(segment.prompt_ids)
        assert then > len(entry.ids)
        assert (trajectory.reward, trajectory.num_turns, trajectory.extra["worker"]) == (1.0, 2, "second")
        assert trajectory.extra["replayed_calls"] == 1
        assert trajectory.metrics["restarts"] == 0
        assert trajectory.metrics["token_mismatches"] == 0
    assert len({tuple(one.segments[0].response_ids.tolist()) for one in trajectories}) == 1
