from __future__ import annotations

import dataclasses

from penstock.agent_loops import Episode
from penstock.agent_loops.rewards import RewardFunction
from penstock.testing import FakeClient
from penstock.tools import ToolResult
from penstock.transfer_queue import OutcomeKind


async def test_a_final_result_ends_the_loop_and_reaches_the_reward(
    queue_of, tasks_of, parts_of, calling_policy, calculator
):
    async def execute(state, arguments):
        return ToolResult(arguments["expression"], final=True)

    def score(data_source, solution_str, ground_truth, extra_info):
        return float(extra_info["final_answer"] == "12+34")

    calculator.execute = execute
    queue = queue_of(tasks_of())
    parts = parts_of(queue, FakeClient(calling_policy(turns=9)), calculator)
    parts = dataclasses.replace(parts, reward=RewardFunction(score))
    outcome = await Episode(parts, queue.lease(tasks_of()[0])).run()
    trajectory = queue.done["train/00000000"]
    assert (outcome.kind, trajectory.num_turns, trajectory.reward) == (OutcomeKind.COMPLETED, 1, 1.0)
    assert trajectory.segments[0].response_mask.all()
