from __future__ import annotations

from tests.agent_loops.conftest import call_text
from tests.agent_loops.loops.conftest import check_fed

from penstock.agent_loops.loops import ToolAgentLoop, with_system
from penstock.tools import ToolResult
from penstock.transfer_queue import Outcome, OutcomeKind


async def test_rewards_of_tools_are_the_turns_rewards(run_loop, saying, calculator):
    async def execute(state, arguments):
        return ToolResult("46", reward=0.25)

    calculator.execute = execute
    client = saying(lambda text: "46" if text.count("tool_response>\n46") == 4 else call_text("1+1", "2+2"))
    _, trajectory = await run_loop(ToolAgentLoop, client, calculator)
    assert trajectory.turn_rewards == (0.5, 0.5, 0.0)
    check_fed(client, trajectory)


async def test_without_rewards_there_are_no_turn_rewards(run_loop, saying, calculator):
    client = saying(lambda text: "46" if "(call 1)" in text else call_text("1+1"))
    _, trajectory = await run_loop(ToolAgentLoop, client, calculator)
    assert (trajectory.turn_rewards, trajectory.num_turns) == ((), 2)


async def test_seconds_are_a_budget_and_keep_what_was_sampled(run_loop, saying, calculator):
    calculator.delay_s = 30
    client = saying(lambda text: call_text("1+1"))
    outcome, trajectory = await run_loop(ToolAgentLoop, client, calculator, settings={"max_seconds": 1.0})
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "deadline")
    assert (trajectory.num_turns, calculator.open) == (1, 0)


async def test_no_answer_within_the_seconds_is_no_reward_of_zero(run_loop, saying):
    client = saying(str, latency_s=9.0)
    outcome, trajectory = await run_loop(ToolAgentLoop, client, settings={"max_seconds": 0.05})
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "rollout", None)


async def test_calls_beyond_the_limit_are_told_so_and_not_run(run_loop, saying, calculator, chat_for):
    client = saying(lambda text: "46" if "(call 2)" in text else call_text("1+1", "2+2", "3+3"))
    _, trajectory = await run_loop(ToolAgentLoop, client, calculator, settings={"max_calls_per_turn": 2})
    assert calculator.executed == ["1+1", "2+2"]
    assert "at most 2 calls in one turn are run" in chat_for().decode(trajectory.segments[0].response_ids)


def test_with_system_prepends_to_text_and_parts():
    image = {"type": "image", "image": "x.png"}
    assert with_system([{"role": "user", "content": "hi"}], "Be short.")[0] == {
        "role": "system",
        "content": "Be short.",
    }
    assert with_system([{"role": "system", "content": "own"}], "Be short.")[0]["content"] == "Be short.\n\nown"
    parts = with_system([{"role": "system", "content": [{"type": "text", "text": "own"}, image]}], "Be short.")
    assert parts[0]["content"] == [{"type": "text", "text": "Be short.\n\n"}, {"type": "text", "text": "own"}, image]
