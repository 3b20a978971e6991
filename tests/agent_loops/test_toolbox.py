from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.agent_loops.conftest import Calculator

from penstock.agent_loops import EpisodeJournal, EpisodeRestart, InfraFailure, ToolBox
from penstock.sandbox import SandboxError, SandboxLost
from penstock.testing import FakeSandbox
from penstock.tools import BaseTool, NoToolReward, PythonTool, ToolConfig, ToolInfraError, ToolResult
from penstock.tools.parsers import ToolCall


def add(expression: str) -> ToolCall:
    return ToolCall("calculator", {"expression": expression})


@pytest.fixture
def box_of(queue_of, tasks_of):
    def make(*tools: BaseTool, queue=None, episode=0, on_lost="replay", count_tokens=None, **limits):
        queue = queue or queue_of(tasks_of())
        task = tasks_of(episode + 1)[episode]
        limits = {"timeout_s": 5.0, "max_output_chars": 2000, **limits}
        configs = {tool.name: ToolConfig(name=tool.name, **limits) for tool in tools}
        journal = EpisodeJournal(queue, queue.lease(task))
        return ToolBox({tool.name: tool for tool in tools}, configs, task, journal, on_lost, count_tokens), queue

    return make


class Stateless(BaseTool):
    name = "wait"
    description = "Waits."
    parameters = {"type": "object", "properties": {"s": {"type": "number"}}}  # noqa: RUF012

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.error = error
        self.cancelled = 0

    async def execute(self, state, arguments):
        if self.error and not arguments.get("s"):
            raise self.error
        try:
            await asyncio.sleep(arguments.get("s", 0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ToolResult("waited")


class Graded(Stateless):
    """Its tests wrote `reward`, or none."""

    def __init__(self, reward: float | None, is_zero: bool = False) -> None:
        super().__init__()
        self.reward, self.is_zero = reward, is_zero

    async def calc_reward(self, state):
        if self.reward is None:
            raise NoToolReward("graded", "no reward file", is_zero=self.is_zero)
        return self.reward


async def test_a_prevented_reward_is_zero_once_another_worker_of_the_run_had_one(box_of):
    async def graded(tool, queue=None, **others):
        box, queue = box_of(tool, queue=queue, **others)
        await box.call_all([ToolCall("wait", {})])
        return await box.rewards(), queue

    with pytest.raises(InfraFailure, match="no reward file"):
        await graded(Graded(None))
    assert (await graded(Graded(None, is_zero=True)))[0] == {"wait": 0.0}
    rewards, queue = await graded(Graded(0.5))
    assert rewards == {"wait": 0.5}
    assert (await graded(Graded(None), queue, episode=1))[0] == {"wait": 0.0}
    with pytest.raises(InfraFailure, match="no reward file"):
        await graded(Graded(None), queue, episode=2, settings={"reward_key": "another"})


async def test_an_operators_zero_proves_no_reward(box_of):
    box, queue = box_of(Graded(None, is_zero=True))
    await box.call_all([ToolCall("wait", {})])
    assert await box.rewards() == {"wait": 0.0}
    box, _ = box_of(Graded(None), queue=queue, episode=1)
    await box.call_all([ToolCall("wait", {})])
    with pytest.raises(InfraFailure, match="no reward file"):
        await box.rewards()


async def test_a_box_lost_while_it_is_graded_is_the_sandboxs_failure(box_of):
    class Lost(Stateless):
        async def calc_reward(self, state):
            raise SandboxLost("the box of session s1 ended during a run")

    box, _ = box_of(Lost())
    await box.call_all([ToolCall("wait", {})])
    with pytest.raises(InfraFailure, match="the box of session s1 ended") as refused:
        await box.rewards()
    assert refused.value.component == "sandbox"


async def test_toolbox_keeps_order_and_makes_state_once(box_of, calculator):
    box, _ = box_of(calculator)
    results = await box.call_all([add("1+1"), add("2+2"), add("3+3")])
    assert [result.text for result in results] == ["2 (call 1)", "4 (call 2)", "6 (call 3)"]
    assert (calculator.created, box.counts.calls, box.counts.errors) == (1, 3, 0)
    await box.release()
    assert calculator.open == 0


async def test_stateless_calls_run_in_parallel(box_of):
    box, _ = box_of(Stateless())
    async with asyncio.timeout(20):  # one after the other they take 40 s
        await box.call_all([ToolCall("wait", {"s": 2.0})] * 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("calculater", {}), "there is no tool 'calculater'; did you mean 'calculator'"),
        (ToolCall("calculator", {}), "expression"),
        (ToolCall("calculator", {"expression": 5}), "5 is not of type 'string'"),
        (ToolCall("", error="not valid JSON at column 7"), "not valid JSON at column 7"),
    ],
)
async def test_what_the_model_did_wrong_is_told_to_the_model(box_of, calculator, call, message):
    box, _ = box_of(calculator)
    (result,) = await box.call_all([call])
    assert result.is_error
    assert message in result.text
    assert calculator.executed == []
    assert box.counts.errors == 1


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([ToolCall("", error="not JSON")] * 2, "malformed calls"),
        ([ToolCall("python", {})], "no tool named python"),
        ([ToolCall("calculator", {})], "wrong arguments for calculator"),
        ([], ""),
    ],
)
async def test_toolbox_names_the_commonest_fault(box_of, calculator, calls, fault):
    box, _ = box_of(calculator)
    await box.call_all(calls)
    assert box.counts.fault == fault
    assert len(box.counts.error_texts) == len(calls)
    await box.release()


async def test_waiting_for_a_box_is_no_part_of_a_calls_time(box_of):
    sandbox = FakeSandbox()
    sandbox.start_s = 1.5
    box, _ = box_of(PythonTool(sandbox), timeout_s=1.0)
    (result,) = await box.call_all([ToolCall("python", {"code": "1"})])
    assert (result.text, result.is_error) == ("python 1", False)
    await box.release()
    assert sandbox.living == set()


async def test_no_box_at_all_is_infrastructure_and_leaves_none(box_of):
    sandbox = FakeSandbox()
    sandbox.failures = 1
    box, _ = box_of(PythonTool(sandbox))
    with pytest.raises(InfraFailure, match="no box today"):
        await box.call_all([ToolCall("python", {"code": "1"})])
    await box.release()
    assert (sandbox.started, sandbox.living) == (1, set())


async def test_long_output_is_cut(box_of, calculator):
    class Loud(Stateless):
        async def execute(self, state, arguments):
            return ToolResult("x" * 10_000)

    box, _ = box_of(Loud(), max_output_chars=100)
    (result,) = await box.call_all([ToolCall("wait", {})])
    assert len(result.text) < 200


@pytest.mark.parametrize(
    ("error", "component"),
    [
        (ToolInfraError("search", "index gone"), "search"),
        (SandboxError("box vanished"), "sandbox"),
        (ZeroDivisionError("a bug"), "tool wait"),
        (TimeoutError("its own"), "tool wait"),
    ],
)
async def test_toolbox_failure_cancels_parallel_calls(box_of, error, component):
    tool = Stateless(error)
    box, queue = box_of(tool)
    with pytest.raises(InfraFailure) as failure:
        await box.call_all([ToolCall("wait", {"s": 9}), ToolCall("wait", {})])
    assert failure.value.component == component
    assert box.failure is failure.value
    assert tool.cancelled == 1
    assert all("results" not in entry.data for entry in queue.journals["train/00000000"])


async def test_a_resumed_episode_repeats_no_tool_call(box_of, calculator):
    box, queue = box_of(calculator)
    first = await box.call_all([add("1+1"), ToolCall("calculator", {})])
    again, _ = box_of(calculator, queue=queue)
    assert await again.call_all([add("1+1"), ToolCall("calculator", {})]) == first
    assert calculator.executed == ["1+1"]
    assert again.counts == box.counts


async def test_a_lost_session_is_brought_back_by_its_earlier_calls(box_of, calculator):
    box, queue = box_of(calculator)
    await box.call_all([add("1+1")])
    again, _ = box_of(calculator, queue=queue)
    await again.call_all([add("1+1")])
    (result,) = await again.call_all([add("2+2")])
    assert result.text == "4 (call 2)"
    assert calculator.executed == ["1+1", "1+1", "2+2"]


class Fragile(Calculator):
    """Its box is lost at the calls and at the creations of these numbers, counted from 1."""

    def __init__(self, *, calls=(), creations=()):
        super().__init__()
        self.lost_calls, self.lost_creations, self.calls = calls, creations, 0

    async def create(self, task):
        if self.created + 1 in self.lost_creations:
            self.created += 1
            raise SandboxLost("the box ended while it was set up")
        return await super().create(task)

    async def execute(self, state, arguments):
        self.calls += 1
        if self.calls in self.lost_calls:
            raise SandboxLost("the box ended during a run")
        return await super().execute(state, arguments)


async def test_a_session_lost_within_a_turn_has_seen_the_calls_of_the_turn(box_of):
    tool = Fragile(calls=[3])
    box, _ = box_of(tool)
    results = await box.call_all([add("1+1"), add("2+2"), add("3+3")])
    assert [result.text for result in results] == ["2 (call 1)", "4 (call 2)", "6 (call 3)"]
    assert tool.executed == ["1+1", "2+2", "1+1", "2+2", "3+3"]


@pytest.mark.parametrize(
    ("tool", "past"),
    [(Fragile(creations=[1]), False), (Fragile(calls=[1, 2]), False), (Fragile(calls=[2]), True)],
    ids=["setup", "twice", "replay"],
)
async def test_a_box_lost_where_no_fresh_one_helps_is_the_sandboxs_failure(box_of, tool, past):
    queue = None
    if past:
        box, queue = box_of(tool)
        await box.call_all([add("1+1")])
    box, _ = box_of(tool, queue=queue)
    if past:
        await box.call_all([add("1+1")])
    with pytest.raises(InfraFailure, match="the box ended") as refused:
        await box.call_all([add("2+2")])
    assert refused.value.component == "sandbox"
    assert box.failure is refused.value
    await box.release()


async def test_or_the_episode_restarts_where_the_recipe_says_so(box_of, calculator):
    box, queue = box_of(calculator)
    await box.call_all([add("1+1")])
    again, _ = box_of(calculator, queue=queue, on_lost="restart")
    await again.call_all([add("1+1")])
    with pytest.raises(EpisodeRestart, match="calculator"):
        await again.call_all([add("2+2")])
    await again.release()
    assert calculator.released == 1


async def test_toolbox_attaches_live_session(box_of, calculator):
    box, queue = box_of(calculator)
    await box.call_all([add("1+1")])
    state = box._states.open_states["calculator"].state
    asked = []

    async def attach(task, session_id):
        asked.append(session_id)
        return state

    calculator.attach = attach
    again, _ = box_of(calculator, queue=queue)
    await again.call_all([add("1+1")])
    (result,) = await again.call_all([add("2+2")])
    assert result.text == "4 (call 2)"
    assert asked == ["box-1"]
    assert calculator.created == 1


async def test_toolbox_cancellation_releases_state(box_of, calculator):
    calculator.delay_s = 30
    box, _ = box_of(calculator)
    running = asyncio.create_task(box.call_all([add("1+1"), add("2+2")]))
    await calculator.entered.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await box.release()
    assert calculator.open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_toolbox_failed_release_is_logged(box_of, calculator, caplog):
    async def broken(state):
        raise RuntimeError("stuck")

    calculator.release = broken
    box, _ = box_of(calculator)
    await box.call_all([add("1+1")])
    await box.release()
    assert "calculator could not be released" in caplog.text


class Grouped(Stateless):
    """Two of these work on one state: the list of what was done."""

    turn_group = "box"
    replayable = False
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self, name, done):
        super().__init__()
        self.name, self.done = name, done

    async def create(self, task):
        return self.done

    async def execute(self, state, arguments):
        await asyncio.sleep(0.01 / arguments["n"])
        state.append(arguments["n"])
        return ToolResult("done")


async def test_toolbox_group_calls_run_in_order(box_of):
    done = []
    box, _ = box_of(Grouped("shell", done), Grouped("editor", done))
    await box.call_all([ToolCall(name, {"n": n}) for n, name in enumerate(["editor", "editor", "shell", "editor"], 1)])
    assert done == [1, 2, 3, 4]
    await box.call_all([ToolCall("shell", {"n": 5})])
    assert done == [1, 2, 3, 4, 5]


async def test_toolbox_lost_group_box_restarts_episode(box_of):
    done = []
    box, queue = box_of(Grouped("shell", done), Grouped("editor", done))
    await box.call_all([ToolCall("shell", {"n": 1})])
    resumed, _ = box_of(Grouped("shell", done), Grouped("editor", done), queue=queue)
    await resumed.call_all([ToolCall("shell", {"n": 1})])
    with pytest.raises(EpisodeRestart):
        await resumed.call_all([ToolCall("editor", {"n": 2})])
    assert done == [1]


async def test_toolbox_final_result_and_token_limit(box_of):
    class Final(Stateless):
        async def execute(self, state, arguments):
            return ToolResult("a b " * 100, final=True)

    limits = {"max_output_chars": 10_000, "max_output_tokens": 30, "cut": "tail"}
    box, _ = box_of(Final(), count_tokens=lambda text: len(text.split()), **limits)
    (result,) = await box.call_all([ToolCall("wait", {})])
    assert len(result.text.split()) <= 30
    assert result.text.endswith("end left out ...]")
    assert box.counts.final_answer == result.text
