from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from penstock.agent_loops import AgentConfig, InfraFailure, LoadError
from penstock.agent_loops.rewards import RewardFunction, load_reward
from penstock.sandbox import SandboxError
from penstock.tools import ToolUnavailable


@pytest.fixture
def score_with(tasks_of):
    async def score(function, **settings):
        (task,) = tasks_of(extra_info={"index": 7})
        return await RewardFunction(function, **settings).score(task, "The answer is 46.", {"num_turns": 2})

    return score


async def test_verls_signature_sync_and_async(score_with):
    def plain(data_source, solution_str, ground_truth, extra_info):
        assert (data_source, extra_info) == ("sums", {"index": 7, "num_turns": 2})
        return ground_truth in solution_str

    async def later(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(0)
        return {"score": 0.25, "length": 3, "text": "x"}

    assert (await score_with(plain)).reward == 1.0
    score = await score_with(later)
    assert (score.reward, score.metrics) == (0.25, {"reward/length": 3.0})


@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "not a finite number"), (float("nan"), "nan"), ({"points": 1}, "without 'score'"), ("1", "'1'")],
)
async def test_anything_else_than_a_number_is_a_failure_and_never_zero(score_with, answer, message):
    with pytest.raises(InfraFailure, match=message):
        await score_with(lambda data_source, solution_str, ground_truth, extra_info: answer)


async def test_a_function_that_raises_is_a_failure_of_the_reward(score_with):
    def broken(data_source, solution_str, ground_truth, extra_info):
        raise ValueError("no number in answer")

    with pytest.raises(InfraFailure, match=r"ValueError: no number in answer \(.*\.py, line \d+\)") as failure:
        await score_with(broken)
    assert failure.value.component == "reward"


async def test_a_function_that_never_ends_is_stopped(score_with):
    async def endless(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(60)

    with pytest.raises(InfraFailure, match="longer than"):
        await score_with(endless, timeout_s=0.05)


@pytest.mark.parametrize(
    ("error", "component"),
    [
        (InfraFailure("judge", "gone"), "judge"),
        (ToolUnavailable("reward_server", "gone"), "reward_server"),
        (SandboxError("gone"), "sandbox"),
        (TimeoutError("gone"), "reward"),
    ],
)
async def test_a_failure_names_the_part_that_failed(score_with, error, component):
    async def broken(data_source, solution_str, ground_truth, extra_info):
        raise error

    with pytest.raises(InfraFailure, match="gone") as failure:
        await score_with(broken)
    assert failure.value.component == component


def test_reward_function_from_file_checks_signature(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def good(data_source, solution_str, ground_truth, extra_info=None): return 1\ndef bad(solution): return 1\n"
    )
    assert load_reward(AgentConfig(reward="judge.py:good"), tmp_path)
    with pytest.raises(LoadError, match=r"must take \(data_source, solution_str, ground_truth, extra_info\)"):
        load_reward(AgentConfig(reward="judge.py:bad"), tmp_path)
    with pytest.raises(LoadError, match="did you mean 'good'"):
        load_reward(AgentConfig(reward="judge.py:goood"), tmp_path)


async def test_a_plain_function_that_blocks_does_not_stop_the_loop(score_with):
    beaten = threading.Event()

    def blocks(data_source, solution_str, ground_truth, extra_info):
        return float(beaten.wait(50))

    scoring = asyncio.ensure_future(score_with(blocks))
    for _ in range(10):
        await asyncio.sleep(0.01)
    beaten.set()
    assert (await scoring).reward == 1.0


async def test_reward_function_runs_in_main_thread_if_needed(score_with, caplog):
    def with_alarm(data_source, solution_str, ground_truth, extra_info):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    assert (await score_with(with_alarm)).reward == 1.0
    assert "compute_score needs the main thread" in caplog.text
