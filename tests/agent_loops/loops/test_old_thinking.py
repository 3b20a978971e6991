"""Loops under ``thinking_history``: what the template drops begins a segment, every segment is handed back."""

from __future__ import annotations

import pytest
from tests.agent_loops.families import FAMILIES, TEMPLATES
from tests.agent_loops.loops.conftest import check_fed, whole
from tests.agent_loops.template_table import auto_chat

from penstock.agent_loops.chat import verify_template
from penstock.agent_loops.loops import ToolAgentLoop
from penstock.agent_loops.loops.multi_agent import MultiAgentLoop
from penstock.transfer_queue import OutcomeKind

THOUGHT = "<think>\nAdd them.\n</think>\n\n"
CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def call(name: str = "calculator", arguments: str = '{"expression": "12+34"}') -> str:
    return THOUGHT + CALLS.format(name, arguments)


def calls_twice(text: str) -> str:
    return "46" if "(call 2)" in text else call()


async def run_deepseek(run_loop, saying, tool, policy, loop=ToolAgentLoop, says=calls_twice, **fields):
    """DeepSeek's template drops the thinking of every earlier reply, before results too."""
    chat = FAMILIES["deepseek"].chat(thinking_history=policy)
    client = saying(says, chat=chat)
    outcome, trajectory = await run_loop(loop, client, tool, chat=chat, **fields)
    return chat, client, outcome, trajectory


async def test_strip_begins_segment_per_turn(run_loop, saying, calculator):
    chat, client, outcome, trajectory = await run_deepseek(run_loop, saying, calculator, "strip")
    assert (outcome.kind, trajectory.num_turns, trajectory.reward) == (OutcomeKind.COMPLETED, 3, 1.0)
    assert [request.token_ids for request in client.requests] == [
        one.prompt_ids.tolist() for one in trajectory.segments
    ]
    assert [len(one.turn_starts) for one in trajectory.segments] == [1, 1, 1]
    assert all(one.response_mask.all() for one in trajectory.segments)
    last = chat.decode(trajectory.segments[-1].prompt_ids)
    assert "Add them." not in last
    assert last.count("calculator\n```json") == 2
    assert "46 (call 1)" in last
    assert "46 (call 2)" in last


async def test_results_that_cannot_be_appended_begin_segments(run_loop, saying, calculator):
    chat = auto_chat(TEMPLATES / "public" / "hunyuan_a13b.jinja")
    assert verify_template(chat, [calculator.schema]).renewing == {"tool"}
    called = '<tool_calls>[{"name": "calculator", "arguments": {"expression": "12+34"}}]</tool_calls>'
    client = saying(lambda text: "46" if "(call 2)" in text else called, chat=chat)
    outcome, trajectory = await run_loop(ToolAgentLoop, client, calculator, chat=chat)
    assert (outcome.kind, trajectory.num_turns, trajectory.reward) == (OutcomeKind.COMPLETED, 3, 1.0)
    assert [request.token_ids for request in client.requests] == [
        one.prompt_ids.tolist() for one in trajectory.segments
    ]
    assert all(one.response_mask.all() for one in trajectory.segments)
    last = chat.decode(trajectory.segments[-1].prompt_ids)
    assert last.endswith(
        f"{called}<|eos|><tool_response>46 (call 1)</tool_response><|extra_0|>"
        f"{called}<|eos|><tool_response>46 (call 2)</tool_response><|extra_0|>"
    )


async def test_kept_it_is_one_segment_and_costs_nothing(run_loop, saying, calculator):
    chat, client, _, trajectory = await run_deepseek(run_loop, saying, calculator, "keep")
    assert len(trajectory.segments) == 1
    check_fed(client, trajectory)
    told = trajectory.metrics
    assert (told["merged_turns"], told["repeated_tokens"], told["refilled_tokens"]) == (1.0, 0.0, 0.0)
    assert chat.decode(whole(trajectory.segments[0])).count("Add them.") == 2


async def test_a_killed_worker_goes_on_in_the_segment_where_it_was(run_loop, saying, calculator, queue_of, tasks_of):
    queue = queue_of(tasks_of())
    _, client, _, trajectory = await run_deepseek(run_loop, saying, calculator, "strip", queue=queue)
    queue.rewind("train/00000000", queue.journals["train/00000000"][:4])
    calculator.executed.clear()
    _, client, _, again = await run_deepseek(run_loop, saying, calculator, "strip", queue=queue)
    assert (len(client.requests), calculator.executed) == (1, [])
    assert [whole(one)[:40] for one in again.segments] == [whole(one)[:40] for one in trajectory.segments]
    assert again.extra["replayed_calls"] == 2


async def test_a_planner_and_its_helpers_hand_back_all_their_segments(run_loop, saying, calculator):
    def plays(text: str) -> str:
        if "Divide the task" in text:
            return "It is 46." if "twelve" in text else call("delegate", '{"question": "first?"}')
        return f"{THOUGHT}twelve" if "(call 1)" in text else call()

    *_, trajectory = await run_deepseek(run_loop, saying, calculator, "strip", loop=MultiAgentLoop, says=plays)
    assert [len(one.turn_starts) for one in trajectory.segments] == [1, 1, 1, 1]
    assert (trajectory.metrics["mismatch/rewritten"], trajectory.num_turns) == (2, 4)


@pytest.mark.parametrize("policy", ["keep", "strip"])
async def test_a_malformed_call_is_told_and_stays_what_it_was(run_loop, saying, calculator, policy):
    def says(text: str) -> str:
        return "46" if "Error" in text else f"{THOUGHT}<｜tool▁calls▁begin｜>broken"

    chat, _, _, trajectory = await run_deepseek(run_loop, saying, calculator, policy, says=says)
    assert "broken" in chat.decode(whole(trajectory.segments[-1]))
    assert calculator.executed == []
