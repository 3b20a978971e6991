from __future__ import annotations

from tests.agent_loops.conftest import call_text
from tests.agent_loops.loops.conftest import check_fed

from penstock.agent_loops.loops.stepwise import StepwiseLoop
from penstock.transfer_queue import Outcome, OutcomeKind


async def test_each_turn_is_a_segment_rendered_from_task_and_memory(run_loop, saying, calculator, chat_for):
    class Mine(StepwiseLoop):
        def memory(self, history):
            return " ".join(result.text for step in history for result in step.results)

    client = saying(lambda text: "It is 46." if "(call 2)" in text else call_text("12+34"))
    outcome, trajectory = await run_loop(Mine, client, calculator)
    prompts = [chat_for().decode(segment.prompt_ids) for segment in trajectory.segments]
    assert [prompt.count("46 (call") for prompt in prompts] == [0, 1, 2]
    assert "What is 12+34?\n\nSo far:\n46 (call 1) 46 (call 2)<|im_end|>" in prompts[2]
    assert [segment.num_turns for segment in trajectory.segments] == [1, 1, 1]
    assert [segment.response_mask.min() for segment in trajectory.segments] == [1, 1, 1]
    assert (outcome.kind, trajectory.turn_rewards) == (OutcomeKind.COMPLETED, (0.0, 0.0, 0.0))
    check_fed(client, trajectory)


async def test_the_memory_in_the_box_tells_the_newest_turns_only(run_loop, saying, calculator, chat_for):
    client = saying(lambda text: call_text("1+1"))
    outcome, trajectory = await run_loop(
        StepwiseLoop, client, calculator, settings={"remembered_turns": 2}, max_turns=4
    )
    last = chat_for().decode(trajectory.segments[-1].prompt_ids)
    assert "2. you:" in last
    assert "   result: 2 (call 3)" in last
    assert "1. you:" not in last
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "turns")
    assert len(calculator.executed) == 4  # the last turn's tools too: they may reward
