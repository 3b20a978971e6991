"""kill -9 of a worker whose agents are programs in boxes: another one finishes each episode, once, token for token."""

from __future__ import annotations

import pytest
from tests.agent_loops.conftest import tokenizer_for
from tests.agent_loops.kill.conftest import stage, stop
from tests.gateway.command.conftest import CLIENT
from tests.sandbox.orphans import Maker, box_processes
from tests.until import until

from penstock.transfer_queue import JournalKind

__all__ = ["stage", "tokenizer_for"]
pytestmark = [pytest.mark.redis, pytest.mark.crash, pytest.mark.bwrap, pytest.mark.deep]
EPISODES = 8
LINES = ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>', "The answer is 46."]
AGENT = """
messages = [user("What is 12+34?"{stamp})]
while True:
    message = ask(messages, tools=TOOLS)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "46"} for call in message["tool_calls"]]
"""
STAMPS = {"the same requests again": "", "other requests": " + f' It is {time.time()}.'"}


@pytest.mark.parametrize("stamp", STAMPS)
async def test_killed_programs_are_finished_by_another_worker(stage, tmp_path, stamp):
    code = CLIENT + AGENT.replace("{stamp}", STAMPS[stamp])
    hold = tmp_path / "hold"
    hold.touch()
    await stage.submit(EPISODES)
    settings = {"command": ["python3", "{home}/agent.py"], "files": {"~/agent.py": code}}
    given = {"episodes": EPISODES, "lines": LINES, "loop": "command", "hold": str(hold), "settings": settings}
    first = stage.worker("first", **given)
    entries = await stage.journaled(EPISODES, JournalKind.SAMPLED)
    first.kill()
    first.wait()
    await until(lambda: not box_processes([Maker(first.pid, "first")]))
    hold.unlink()
    second = stage.worker("second", **given)
    trajectories = await stage.finished(EPISODES)
    stop(second)
    assert len({one.episode_id for one in trajectories}) == EPISODES
    replayed = not STAMPS[stamp]
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        (entry,) = entries[trajectory.episode_id]
        start = segment.turn_starts.tolist()[0]
        assert segment.response_ids[start : start + len(entry.ids)].tolist() == entry.ids.tolist()
        assert (trajectory.reward, trajectory.num_turns, trajectory.extra["worker"]) == (1.0, 2, "second")
        assert trajectory.metrics["restarts"] == (0 if replayed else 1)
        assert trajectory.metrics["token_mismatches"] == 0
