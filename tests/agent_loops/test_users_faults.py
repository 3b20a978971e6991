"""Whatever code of users does: the queue hears at once of the episode's end, with its cause, and the worker lives."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.agent_loops import AgentLoopBase, Episode
from penstock.agent_loops.rewards import BaseReward, RewardFunction
from penstock.common.event_loop import run_users_code
from penstock.testing import FakeClient
from penstock.tools import ToolResult, function_tool
from penstock.transfer_queue import OutcomeKind

HERE = r"\(.*test_users_faults\.py, line \d+\)"


def returning(**output: Any) -> type[AgentLoopBase]:
    class Returning(AgentLoopBase):
        async def run(self, task):
            segment = self.chat.start(task.messages)
            await self.llm.generate(segment)
            return segment.output(**output)

    return Returning


def returning_value(value: Any) -> type[AgentLoopBase]:
    class ReturningValue(AgentLoopBase):
        async def run(self, task):
            await self.llm.generate(self.chat.start(task.messages))
            return value

    return ReturningValue


def place_of(function: Callable[..., Any]) -> str:
    return rf" \(.*test_users_faults\.py, line {function.__code__.co_firstlineno}\)$"


def with_method(name: str, method: Callable[..., Any]) -> type[AgentLoopBase]:
    return type("Odd", (returning(reward=1.0),), {name: method})


def leave(*_: Any, **__: Any) -> Any:
    sys.exit("done")


async def leave_async(*_: Any, **__: Any) -> Any:
    sys.exit("done")


async def leave_in_a_branch(loop: AgentLoopBase, task: Any) -> Any:
    await loop.together([leave_async(), leave_async()])


async def leave_in_gather(*_: Any, **__: Any) -> Any:
    await asyncio.gather(asyncio.sleep(0), leave_async())


async def asking_in_gather(expression: str) -> str:
    """Calculates."""
    return await leave_in_gather()


async def leave_in_a_task(*_: Any, **__: Any) -> Any:
    await asyncio.create_task(leave_async())


async def leave_in_a_group(*_: Any, **__: Any) -> Any:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(60))
        tasks.create_task(leave_async())


async def leave_in_time(*_: Any, **__: Any) -> Any:
    await asyncio.wait_for(leave_async(), 60)


LEFT = f"SystemExit: done {HERE}"
LOOPS = {
    "metric of None": (returning(reward=1.0, metrics={"f1": None}), r"metrics\['f1'\] is None, not a number"),
    "reward of text": (returning(reward="right"), "reward is 'right', not a number"),
    "reward over floats": (returning(reward=10**400), "reward is 1000.*, not a number"),
    "reward of NaN": (returning(reward=float("nan")), "reward: nan is not finite"),
    "turn reward of text": (returning(reward=1.0, turn_rewards=["x"]), "turn_rewards is 'x', not a number"),
    "turn rewards of two": (returning(reward=1.0, turn_rewards=[1.0, 2.0]), "turn_rewards: 2 for 1 turns"),
    "extra of a set": (returning(reward=1.0, extra={"seen": {1}}), r"extra\.seen: set"),
    "no output": (returning_value(None), r"run\(\) returned None"),
    "empty list": (returning_value([]), r"run\(\) returned \[\]"),
}
LEAVING = {"setup": with_method("setup", leave), "run": with_method("run", leave_async)}
TASKS = {
    "branch": {"loop": with_method("run", leave_in_a_branch)},
    "gather": {"loop": with_method("run", leave_in_gather)},
    "task": {"loop": with_method("run", leave_in_a_task)},
    "group": {"loop": with_method("run", leave_in_a_group)},
    "wait_for": {"loop": with_method("run", leave_in_time)},
    "setup": {"loop": with_method("setup", leave_in_gather)},
    "reward": {"loop": returning(), "reward": RewardFunction(leave_in_gather)},
    "tool": {"tool": function_tool(name="calculator")(asking_in_gather)},
}


@pytest.fixture
def played(queue_of, tasks_of, parts_of, calling_policy):
    """The outcome of one episode, and its queue."""

    async def run(loop=None, tool=None, **fields):
        queue = queue_of(tasks_of())
        parts = parts_of(queue, FakeClient(calling_policy()), tool, **fields)
        if loop is not None:
            parts = dataclasses.replace(parts, find_loop=lambda name: loop)
        return await Episode(parts, queue.lease(tasks_of()[0])).run(), queue

    return run


@pytest.fixture
def ending(played):
    """Runs one episode and returns its outcome, which the queue has received too."""

    async def run(*args, **fields):
        outcome, queue = await played(*args, **fields)
        assert queue.failed == [outcome]
        assert outcome.kind is OutcomeKind.INFRA_ERROR
        return outcome

    return run


@pytest.mark.parametrize("fault", LOOPS)
async def test_a_fault_in_what_a_loop_returns_names_the_loops_file_and_line(ending, fault: str) -> None:
    loop, reason = LOOPS[fault]
    outcome = await ending(loop)
    assert re.search(f"{reason}.*{place_of(loop.run)}", outcome.reason), outcome


@pytest.mark.parametrize("method", LEAVING)
async def test_a_loop_that_leaves_the_process_is_reported(ending, method: str) -> None:
    outcome = await ending(LEAVING[method])
    assert re.search(LEFT, outcome.reason), outcome


@pytest.mark.parametrize("reward", [leave, leave_async])
async def test_a_reward_that_leaves_the_process_is_reported(ending, reward: Callable[..., Any]) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return reward()

    outcome = await ending(returning(), reward=RewardFunction(compute_score))
    assert outcome.component == "reward"
    assert re.search(LEFT, outcome.reason), outcome


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(10**400, "returned 1000", id="over floats"),
        ("right", "returned 'right', not a"),
        ({"score": None}, "returned None, not a"),
        ({}, "without 'score'"),
    ],
)
async def test_a_fault_in_what_a_reward_returns_names_its_file_and_line(ending, value: Any, reason: str) -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info, **settings):
        return value

    class Scorer(BaseReward):
        async def score(self, answer):
            return value

        def __call__(self, data_source, solution_str, ground_truth, extra_info):
            return value

    for reward, function in (
        (compute_score, compute_score),
        (functools.partial(compute_score, strict=True), compute_score),
        (Scorer().__call__, Scorer.__call__),
        (Scorer(), Scorer.score),
    ):
        outcome = await ending(returning(), reward=RewardFunction(reward))
        assert outcome.component == "reward"
        assert re.search(f"{reason}.*{place_of(function)}", outcome.reason), outcome


@pytest.mark.parametrize("leaves", [leave, leave_async])
async def test_a_tool_that_leaves_the_process_is_reported(ending, leaves: Callable[..., Any]) -> None:
    @function_tool
    async def calculator(expression: str) -> str:
        """Calculates."""
        return leaves() if leaves is leave else await leaves()

    outcome = await ending(tool=calculator)
    assert "calculator" in outcome.component
    assert re.search(LEFT, outcome.reason), outcome


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("46", "execute returned '46'"),
        (None, "execute returned None"),
        pytest.param(("46", 1.0), r"execute returned \('46', 1.0\)", id="a tuple"),
        (ToolResult(None), "whose text is None"),
        (ToolResult("46", reward="right"), "whose reward is 'right'"),
        (ToolResult("46", reward=float("nan")), "whose reward is nan"),
        pytest.param(ToolResult("46", reward=10**400), "whose reward is 1000", id="over floats"),
        (ToolResult("46", images=(Path("plot.png"),)), "whose images is"),
        (ToolResult("46", metrics={"f1": None}), "whose metrics is {'f1': None}"),
    ],
)
async def test_a_fault_in_what_a_tool_returns_names_its_file_and_line(
    ending, calculator, monkeypatch, returned: Any, reason: str
) -> None:
    async def execute(self, state, arguments):
        return returned

    monkeypatch.setattr(type(calculator), "execute", execute)
    outcome = await ending(tool=calculator)
    assert outcome.component == "tool calculator"
    assert re.search(f"{reason}.*{place_of(execute)}", outcome.reason), outcome


@pytest.mark.parametrize("value", ["right", float("nan"), pytest.param(10**400, id="over floats")])
async def test_a_fault_in_a_tools_reward_names_its_file_and_line(ending, calculator, monkeypatch, value: Any) -> None:
    async def calc_reward(self, state):
        return value

    monkeypatch.setattr(type(calculator), "calc_reward", calc_reward)
    outcome = await ending(tool=calculator)
    assert outcome.component == "tool calculator"
    assert re.search(f"calc_reward returned {value!r:.20}.*{place_of(calc_reward)}", outcome.reason), outcome


@pytest.mark.parametrize("place", TASKS)
def test_a_task_that_leaves_the_process_fails_its_own_episode_alone(ending, played, place: str) -> None:
    endings = []

    async def play() -> None:
        forgotten = asyncio.create_task(leave_async())
        endings.append(await ending(**TASKS[place]))
        endings.append((await played(returning(reward=1.0)))[0])
        assert forgotten.done()
        forgotten.exception()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run_users_code(runner, play())
    assert re.search(LEFT, endings[0].reason), endings
    assert endings[1].kind is OutcomeKind.COMPLETED


async def test_an_exception_of_our_own_is_reported_with_file_and_line(ending, monkeypatch) -> None:
    monkeypatch.setattr("penstock.agent_loops.episode.images_of", leave)
    assert re.search(LEFT, (await ending(returning(reward=1.0))).reason)
