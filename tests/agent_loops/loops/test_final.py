"""A tool result that is `final` ends every loop: nothing is sampled after it."""

from __future__ import annotations

import pytest
from tests.agent_loops.conftest import call_text
from tests.agent_loops.loops.test_code_act import BLOCK, Interpreter
from tests.agent_loops.loops.test_multi_agent import delegate

from penstock.agent_loops.loops import ToolAgentLoop
from penstock.agent_loops.loops.code_act import CodeActLoop
from penstock.agent_loops.loops.multi_agent import MultiAgentLoop
from penstock.agent_loops.loops.stepwise import StepwiseLoop
from penstock.tools import ToolResult
from penstock.transfer_queue import OutcomeKind


def ends_at(tool, call: int) -> None:
    """From its `call`-th call on, its results are final."""
    count = 0

    async def execute(state, arguments):
        nonlocal count
        count += 1
        return ToolResult(f"46 at {count}", reward=1.0, final=count >= call)

    tool.execute = execute


@pytest.mark.parametrize(
    ("loop", "says", "at_call", "turn_rewards"),
    [
        (ToolAgentLoop, call_text("1+1"), 2, (1.0, 1.0)),
        (CodeActLoop, BLOCK, 4, (2.0, 2.0)),  # two blocks an answer
        (StepwiseLoop, call_text("1+1"), 3, (1.0, 1.0, 1.0)),
    ],
)
async def test_a_final_result_ends_the_loop(run_loop, saying, calculator, loop, says, at_call, turn_rewards):
    tool = Interpreter() if loop is CodeActLoop else calculator
    ends_at(tool, at_call)
    outcome, trajectory = await run_loop(loop, saying(lambda text: says), tool)
    assert (outcome.kind, trajectory.turn_rewards) == (OutcomeKind.COMPLETED, turn_rewards)
    assert trajectory.num_turns == len(turn_rewards)


async def test_a_final_result_reaches_the_reward(run_loop, saying, calculator):
    def score(data_source, solution_str, ground_truth, extra_info):
        return float(extra_info["final_answer"] == "46 at 1")

    ends_at(calculator, 1)
    client = saying(lambda text: call_text("1+1"))
    _, trajectory = await run_loop(ToolAgentLoop, client, calculator, score=score)
    assert (trajectory.num_turns, trajectory.reward) == (1, 1.0)
    assert trajectory.segments[0].response_mask.all()


async def test_multi_agent_final_result_ends_helper_only(run_loop, saying, calculator, chat_for):
    ends_at(calculator, 1)

    def plays(text: str) -> str:
        if "Divide the task" not in text:
            return call_text("12+34")
        return "So 46." if "46 at 1" in text else delegate("first?")

    outcome, trajectory = await run_loop(MultiAgentLoop, saying(plays), calculator)
    helper, planner = trajectory.segments
    assert (len(helper.turn_starts), len(planner.turn_starts)) == (1, 2)
    assert trajectory.turn_rewards == (1.0, 0.0, 0.0)
    assert "<tool_response>\n46 at 1\n</tool_response>" in chat_for().decode(planner.response_ids)
    assert outcome.kind is OutcomeKind.COMPLETED
