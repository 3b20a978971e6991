"""`check_env`: a scripted policy instead of a model, in a real worker with a custom tool."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from penstock.agent_loops import AgentConfig, LoadError, WorkerStopped
from penstock.testing import SPLIT, EpisodeState, check_env, try_loop
from penstock.tools import ToolConfig
from penstock.transfer_queue import Task

MODEL = str(Path(__file__).parents[2] / "recipes/calculator/model")
TOOL = """
from penstock.tools import function_tool

@function_tool
def double(number: int) -> str:
    '''Twice a number.'''
    if number == 13:
        raise RuntimeError("the machine is broken")
    return str(2 * number)
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["final_text"] == str(ground_truth))
"""
ROOM = {"max_new_tokens": 400, "max_response_tokens": 2000, "max_turns": 3}


@pytest.fixture
def recipe_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "doubling_for_rehearsal.py").write_text(TOOL)
    (tmp_path / "judge.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def tasks(*numbers: int) -> list[Task]:
    asked = [[{"role": "user", "content": f"Twice {number}?"}] for number in numbers]
    return [Task(f"t{n}", SPLIT, asked[n], "doubling", 2 * number) for n, number in enumerate(numbers)]


async def play(recipe_dir: Path, policy, *numbers: int, slack_s: float = 60.0, on_ended=lambda _: None, **fields):
    config = AgentConfig(**{**ROOM, "reward": "judge.py:compute_score", "concurrency": 2, **fields})
    tools = [ToolConfig(name="doubling_for_rehearsal.double")]
    return await check_env(
        tasks(*numbers),
        policy,
        model=MODEL,
        config=config,
        tools=tools,
        recipe_dir=recipe_dir,
        on_ended=on_ended,
        slack_s=slack_s,
    )


def honest(state: EpisodeState) -> str:
    if not state.turn:
        return state.call("double", number=int(state.task.ground_truth) // 2)
    return state.results[-1]


async def test_env_check_policy_reads_results_in_order(recipe_dir: Path) -> None:
    ended: list[int] = []
    numbers = (4, 1, 3, 2, 5)
    check = await play(recipe_dir, honest, *numbers, on_ended=ended.append)
    assert (check.rewards, check.failures) == ([1.0] * 5, [])
    assert [one.extra["tool_results"] for one in check.trajectories] == [[str(2 * number)] for number in numbers]
    assert [one.num_turns for one in check.trajectories] == [2] * 5
    assert ended[-1] == 5


async def test_env_check_policy_sees_its_turn(recipe_dir: Path) -> None:
    seen: list[tuple[int, list[str]]] = []

    def twice(state: EpisodeState) -> str:
        seen.append((state.turn, state.results))
        return state.call("double", number=state.turn + 1) if state.turn < 2 else "done"

    check = await play(recipe_dir, twice, 7)
    assert seen == [(0, []), (1, ["2"]), (2, ["2", "4"])]
    assert check.rewards == [0.0]


async def test_env_check_policy_gives_a_tool_an_argument_called_name(recipe_dir: Path) -> None:
    def calls_person(state: EpisodeState) -> str:
        return state.results[-1] if state.turn else state.call("double", name="x", self=1)

    check = await play(recipe_dir, calls_person, 7)
    assert check.failures == []
    assert "unknown argument 'name'" in check.trajectories[0].extra["tool_error_texts"][0]


async def test_env_check_broken_tool_is_no_zero_reward(recipe_dir: Path) -> None:
    check = await play(recipe_dir, honest, 1, 13, 2)
    assert check.rewards == [1.0, 1.0]
    (letter,) = check.failures
    assert letter.episode_id == f"{SPLIT}/00000001#0"
    assert re.search(r"the machine is broken \(.*doubling_for_rehearsal\.py, line 8\)", letter.outcome.reason)


async def test_env_check_reports_policy_error(recipe_dir: Path) -> None:
    def broken(state: EpisodeState) -> str:
        raise KeyError("no such row")

    check = await play(recipe_dir, broken, 1)
    assert check.trajectories == []
    assert "no such row" in check.failures[0].outcome.reason


async def test_env_check_raises_recipe_error(recipe_dir: Path) -> None:
    with pytest.raises(LoadError, match=r"no file 'nowhere\.py'"):
        await play(recipe_dir, honest, 1, reward="nowhere.py:f")


async def test_env_check_stops_without_progress(recipe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("penstock.testing.env_check.ScriptedClient.generate", hang)
    with pytest.raises(WorkerStopped, match="0 of 1 episodes ended"):
        await play(recipe_dir, honest, 1, slack_s=-659.5, episode_deadline_s=600, rewards={"timeout_s": 60.0})


async def test_try_loop_takes_a_shipped_model_from_any_folder(recipe_dir, monkeypatch):
    monkeypatch.chdir(recipe_dir)
    trajectory = await try_loop(
        "single_turn",
        tasks(4)[0],
        model="recipes/calculator/model",
        says=["8"],
        recipe_dir=recipe_dir,
        reward="judge.py:compute_score",
    )
    assert trajectory.reward == 1.0
