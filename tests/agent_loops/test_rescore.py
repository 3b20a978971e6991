"""A reward that is computed again gets what the worker gave it, and changes nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.agent_loops import AgentConfig, ChatTokens, InfraFailure, LoadError, rescored
from penstock.agent_loops.chat import chat_of
from penstock.agent_loops.rewards import RewardFunction
from penstock.transfer_queue import COMPLETED, Segment, Task, Trajectory

MODEL = Path(__file__).parents[2] / "recipes" / "calculator" / "model"
QUESTION = [{"role": "user", "content": "What is 17+29?"}]


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return chat_of(str(MODEL), AgentConfig())


def task(name: str = "train/0000/00000007") -> Task:
    return Task(name, "train", QUESTION, data_source="sums", ground_truth="46", extra_info={"index": 7})


def played(chat: ChatTokens, name: str = "train/0000/00000007#0") -> Trajectory:
    """A call of a tool, its answer 46, and the last turn, 45."""
    ids = lambda text: chat.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    parts = [(ids("print(17+29)"), 1), (ids("\n46\n"), 0), (ids("45"), 1)]
    mask = np.concatenate([np.full(len(part), kind, np.uint8) for part, kind in parts])
    segment = Segment(
        prompt_ids=np.array(ids("user\nWhat is 17+29?\nassistant\n"), np.int32),
        response_ids=np.concatenate([np.array(part, np.int32) for part, _ in parts]),
        response_mask=mask,
        response_logprobs=np.where(mask == 1, -0.5, 0).astype(np.float32),
        version_spans=np.array([[3, 0, len(mask)]], np.int32),
        turn_starts=np.array([0, len(mask) - len(parts[2][0])], np.int32),
    )
    metrics = {"tool_calls": 1.0, "tool_reward/python": 0.5, "reward/length": 9.0, "latency_s": 2.0}
    extra = {"program": {"exit": 0}, "final_answer": "45"}
    values: dict[str, Any] = {"num_turns": 2, "metrics": metrics, "extra": extra, "data_source": "sums"}
    return Trajectory(name, name.partition("#")[0], [segment], 1.0, COMPLETED, **values)


async def again(chat: ChatTokens, trajectory: Trajectory, of: Task, function: Any) -> Trajectory:
    (one,) = await rescored([trajectory], {of.task_id: of}, RewardFunction(function), chat, 4)
    return one


async def test_the_function_gets_what_the_worker_gave_it(chat: ChatTokens) -> None:
    arguments: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        arguments.update(extra_info, source=data_source, solution=solution_str, truth=ground_truth)
        return {"score": float(extra_info["final_text"].strip() == ground_truth), "digits": 2}

    before = played(chat)
    after = await again(chat, before, task(), compute_score)
    assert (arguments["source"], arguments["truth"], arguments["index"]) == ("sums", "46", 7)
    assert arguments["solution"].split() == arguments["segments"][0].split() == ["print(17+29)", "46", "45"]
    assert (arguments["final_text"].strip(), arguments["num_turns"], arguments["tool_calls"]) == ("45", 2, 1)
    assert (arguments["tool_rewards"], arguments["final_answer"]) == ({"python": 0.5}, "45")
    assert arguments["program"] == {"exit": 0}
    metrics = {"tool_calls": 1.0, "tool_reward/python": 0.5, "reward/digits": 2.0, "latency_s": 2.0}
    assert after == replace(before, reward=0.0, metrics=metrics)
    assert after.segments is before.segments


@pytest.mark.parametrize(
    "changed", [{"messages": [{"role": "user", "content": "What is 8*9?"}]}, {"data_source": "products"}]
)
async def test_a_row_that_was_not_the_one_played_is_refused(chat: ChatTokens, changed: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"train/0000/00000007: .* the data have changed"):
        await again(chat, played(chat), replace(task(), **changed), lambda **_: 1.0)


async def test_a_failing_reward_is_asked_again_and_then_names_the_episode(chat: ChatTokens) -> None:
    failures = ["no service"]

    def flaky(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        if failures:
            raise OSError(failures.pop())
        return 0.25

    assert (await again(chat, played(chat), task(), flaky)).reward == 0.25
    failures += ["no service"] * 3
    with pytest.raises(InfraFailure, match=r"train/0000/00000007#0: .*no service"):
        await again(chat, played(chat), task(), flaky)


async def test_a_reward_that_fails_for_good_ends_those_of_others(chat: ChatTokens, monkeypatch: Any) -> None:
    """None asks a reward, or a sandbox, that its caller has closed meanwhile."""
    monkeypatch.setattr("penstock.agent_loops.rescore.ATTEMPTS", 1)
    names = ["train/0000/00000007#0", "train/0000/00000007#1"]
    cancelled = asyncio.Event()

    class Reward(RewardFunction):
        async def score(self, *args: Any, **kwargs: Any) -> Any:
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked == len(names):
                raise InfraFailure("judge", "away")
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

    with pytest.raises(InfraFailure, match="away"):
        await rescored(
            [played(chat, name) for name in names], {task().task_id: task()}, Reward(lambda **_: 1.0), chat, 4
        )
    assert cancelled.is_set()
