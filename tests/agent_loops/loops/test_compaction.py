from __future__ import annotations

import numpy as np
import pytest
from tests.agent_loops.conftest import call_text
from tests.agent_loops.loops.conftest import check_fed, whole

from penstock.agent_loops.loops.compaction import CompactionLoop
from penstock.tools import ToolResult
from penstock.transfer_queue import Outcome, OutcomeKind

EACH_TURN = {"compact_at": 1, "request": "Summarise.", "heading": "So far:"}


def plays(text: str, calls: int = 3) -> str:
    """Calls once per segment, and carries the number of calls in its summaries; answers after the last."""
    done = int(text.rpartition("calls: ")[2][:1]) if "calls: " in text else 0
    if text.endswith("Summarise.<|im_end|>\n<|im_start|>assistant\n"):
        return f"calls: {done + 1}"
    return "It is 46." if done == calls else call_text(f"{done}+1")


async def test_a_summary_ends_its_segment_and_begins_the_next_one(run_loop, saying, calculator, chat_for):
    client = saying(plays)
    outcome, trajectory = await run_loop(CompactionLoop, client, calculator, settings=EACH_TURN)
    decode = chat_for().decode
    prompts = [decode(segment.prompt_ids) for segment in trajectory.segments]
    assert ["So far:" in prompt for prompt in prompts] == [False, True, True, True]
    assert "What is 12+34?\n\nSo far:\ncalls: 2<|im_end|>" in prompts[2]
    assert all("tool_response" not in prompt and "calls: 1" not in prompt for prompt in prompts[2:])
    assert [segment.num_turns for segment in trajectory.segments] == [2, 2, 2, 1]
    ends = [decode(segment.response_ids[segment.turn_starts[-1] :]) for segment in trajectory.segments]
    assert ends == ["calls: 1<|im_end|>", "calls: 2<|im_end|>", "calls: 3<|im_end|>", "It is 46.<|im_end|>"]
    assert (outcome.kind, trajectory.reward) == (OutcomeKind.COMPLETED, 1.0)
    check_fed(client, trajectory)


async def test_summaries_are_trained_and_requests_are_not(run_loop, saying, calculator, chat_for):
    _, trajectory = await run_loop(CompactionLoop, saying(plays), calculator, settings=EACH_TURN)
    first = trajectory.segments[0]
    sampled = chat_for().decode(first.response_ids[first.response_mask == 1])
    fed = chat_for().decode(first.response_ids[first.response_mask == 0])
    assert "calls: 1" in sampled
    assert "Summarise." in fed
    assert "Summarise." not in sampled
    assert np.all(first.response_logprobs[first.response_mask == 0] == 0)


async def test_nothing_is_compacted_below_the_threshold(run_loop, saying, calculator):
    def answers(text: str) -> str:
        return "46" if "(call 2)" in text else call_text("1+1")

    client = saying(answers)
    _, trajectory = await run_loop(CompactionLoop, client, calculator, settings={"compact_at": 100_000})
    assert [segment.num_turns for segment in trajectory.segments] == [3]
    lengths = [len(request.token_ids) for request in client.requests]
    client = saying(answers)
    at_second = {"compact_at": lengths[1], "request": "Summarise."}
    _, trajectory = await run_loop(CompactionLoop, client, calculator, settings=at_second)
    assert trajectory.segments[0].num_turns == 3  # two calls, then the summary


async def test_turn_rewards_stay_with_their_turns(run_loop, saying, calculator):
    async def execute(state, arguments):
        return ToolResult("7", reward=float(arguments["expression"][0]) + 0.5)

    calculator.execute = execute
    _, trajectory = await run_loop(CompactionLoop, saying(plays), calculator, settings=EACH_TURN)
    assert trajectory.turn_rewards == (0.5, 0.0, 1.5, 0.0, 2.5, 0.0, 0.0)


async def test_thinking_is_not_part_of_a_summary(run_loop, saying, calculator, chat_for):
    def thinks(text: str) -> str:
        said = plays(text)
        return f"<think>\nhm\n</think>\n\n{said}" if said.startswith("calls") else said

    _, trajectory = await run_loop(CompactionLoop, saying(thinks), calculator, settings=EACH_TURN)
    assert "So far:\ncalls: 1<|im_end|>" in chat_for().decode(trajectory.segments[1].prompt_ids)
    assert "hm" in chat_for().decode(trajectory.segments[0].response_ids)


async def test_a_summary_is_cut_at_its_own_limit(run_loop, saying, calculator, chat_for):
    def talks(text: str) -> str:
        return "a " * 200 if "Summarise." in text else "46" if "So far:" in text else call_text("1+1")

    settings = {**EACH_TURN, "max_summary_tokens": 5}
    outcome, trajectory = await run_loop(CompactionLoop, saying(talks), calculator, settings=settings)
    summary = trajectory.segments[0].response_ids[trajectory.segments[0].turn_starts[-1] :]
    assert (len(summary), outcome.kind) == (5, OutcomeKind.COMPLETED)
    assert "So far:\na a" in chat_for().decode(trajectory.segments[1].prompt_ids)


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({"max_turns": 5}, "turns", [2, 2, 1]),  # no turn would be left to use a third summary: it is not asked for
        ({"max_turns": 4}, "turns", [2, 2]),
        ({"max_response_tokens": 150}, "length", None),
    ],
)
async def test_budgets_end_a_compacted_episode(run_loop, saying, calculator, limits, reason, turns):
    client = saying(lambda text: plays(text, calls=9))
    outcome, trajectory = await run_loop(CompactionLoop, client, calculator, settings=EACH_TURN, **limits)
    assert outcome == Outcome(OutcomeKind.TRUNCATED, reason)
    if turns:
        assert [segment.num_turns for segment in trajectory.segments] == turns
    check_fed(client, trajectory)


@pytest.mark.parametrize("kept", range(1, 10))
async def test_a_killed_worker_loses_no_summary(run_loop, saying, calculator, queue_of, tasks_of, kept):
    """Every prefix of the journal: the next worker gives the recorded answers, and samples the rest alone."""
    queue, client = queue_of(tasks_of()), saying(plays)
    _, before = await run_loop(CompactionLoop, client, calculator, queue=queue, settings=EACH_TURN)
    asked, entries = len(client.requests), queue.journals["train/00000000"]
    sampled = sum(entry.ids is not None for entry in entries[:kept])
    queue.rewind("train/00000000", entries[:kept])
    _, after = await run_loop(CompactionLoop, client, calculator, queue=queue, settings=EACH_TURN)
    assert len(client.requests) - asked == asked - sampled
    texts = [[segment.response_mask.tolist() for segment in one.segments] for one in (before, after)]
    assert len(texts[0]) == len(texts[1])
    recorded = max(0, sampled // 2)
    assert [whole(one) for one in after.segments[:recorded]] == [whole(one) for one in before.segments[:recorded]]


async def test_results_that_outgrow_the_window_end_the_episode(run_loop, saying, calculator):
    """Every segment is within the window, although the budget of all of them is larger than it."""

    async def execute(state, arguments):
        return ToolResult("7 " * (400 if arguments["expression"].startswith("1") else 1))

    calculator.execute = execute
    client = saying(plays)
    outcome, trajectory = await run_loop(CompactionLoop, client, calculator, settings=EACH_TURN, window=500)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.TRUNCATED, "length")
    assert max(len(request.token_ids) for request in client.requests) < 500
    assert [segment.num_turns for segment in trajectory.segments] == [2, 1]
