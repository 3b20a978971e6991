from __future__ import annotations

import asyncio

import pytest
from tests.agent_loops.loops.conftest import check_fed

from penstock.agent_loops.loops.multi_agent import MultiAgentLoop
from penstock.testing import FakeClient
from penstock.transfer_queue import OutcomeKind


def delegate(*questions: str) -> str:
    one = '<tool_call>\n{{"name": "delegate", "arguments": {{"question": "{}"}}}}\n</tool_call>'
    return "\n".join(one.format(question) for question in questions)


def plays(text: str) -> str:
    if "Divide the task" not in text:
        return "twelve" if "first?" in text else "thirty-four"
    return "It is 46." if "<tool_response>" in text.split("What is 12+34?")[1] else delegate("first?", "second?")


async def test_multi_agent_planner_segment_is_last(run_loop, saying, chat_for):
    client = saying(plays)
    outcome, trajectory = await run_loop(MultiAgentLoop, client)
    texts = [chat_for().decode(segment.response_ids) for segment in trajectory.segments]
    assert texts[:2] == ["twelve<|im_end|>", "thirty-four<|im_end|>"]
    assert "twelve\n</tool_response>" in texts[2]
    assert texts[2].endswith("It is 46.<|im_end|>")
    assert (outcome.kind, trajectory.num_turns, trajectory.reward) == (OutcomeKind.COMPLETED, 4, 1.0)
    check_fed(client, trajectory)


async def test_helpers_work_side_by_side(run_loop, saying):
    at_once = most = 0

    class Slow(FakeClient):
        async def generate(self, request):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.5)
            at_once -= 1
            return await super().generate(request)

    await run_loop(MultiAgentLoop, Slow(saying(plays).reply))
    assert most == 2


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_multi_agent_resumes_from_any_journal_order(run_loop, saying, queue_of, tasks_of, kept):
    queue, client = queue_of(tasks_of()), saying(plays)
    await run_loop(MultiAgentLoop, client, queue=queue)
    entries = queue.journals["train/00000000"]
    queue.rewind("train/00000000", [entries[0], entries[2], entries[1]][:kept])
    asked = len(client.requests)
    _, trajectory = await run_loop(MultiAgentLoop, client, queue=queue)
    assert len(client.requests) - asked == 4 - kept
    assert trajectory.metrics["restarts"] == 0
    assert trajectory.extra["replayed_calls"] == kept


async def test_multi_agent_divides_budget_and_refuses_calls(run_loop, saying, chat_for):
    def greedy(text: str) -> str:
        if "Divide the task" not in text:
            return "yes"
        return "Done." if "yes" in text.split("What is 12+34?")[1] else delegate("a", "b", "c", "d")

    outcome, trajectory = await run_loop(MultiAgentLoop, saying(greedy), max_turns=4)
    text = chat_for().decode(trajectory.segments[-1].response_ids)
    assert len(trajectory.segments) == 3  # two helpers: one turn is kept for the planner's answer
    assert text.count("Error: no helper is free any more") == 2
    assert (outcome.kind, trajectory.num_turns) == (OutcomeKind.COMPLETED, 4)


async def test_calls_that_are_none_get_their_error_and_cost_nothing(run_loop, saying, chat_for):
    def wrong(text: str) -> str:
        bad = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
        return "Well." if "Error" in text else bad

    _, trajectory = await run_loop(MultiAgentLoop, saying(wrong))
    assert "Error: there is no tool 'other'" in chat_for().decode(trajectory.segments[0].response_ids)
    assert len(trajectory.segments) == 1
