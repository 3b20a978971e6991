"""Which reward a row gets, and what is said where none can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.agent_loops import AgentConfig, InfraFailure, LoadError, load_object
from penstock.agent_loops.config import RewardChoice
from penstock.agent_loops.rewards import check_reward, choice_for, load_reward, may_need_sandbox
from penstock.agent_loops.rewards.registry import DATA_SOURCES, REWARDS, make_reward

SOURCES = {"mine": "search_f1", "mine_*": {"name": "gsm8k", "settings": {"method": "flexible"}}}


def by_source(**sources) -> AgentConfig:
    return AgentConfig(reward="by_data_source", rewards={"sources": sources or SOURCES})


@pytest.mark.parametrize(
    ("data_source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "maths"),
        ("HuggingFaceH4/MATH-500", "maths"),
        ("math_dapo_reasoning", "maths"),
        ("aime2024", "maths"),
        ("numina_cn_k12", "maths"),
        ("taco", "code"),
        ("searchR1_hotpotqa", "search_em"),
        ("mine", "search_f1"),
        ("mine_too", "gsm8k"),
    ],
)
def test_verls_names_and_the_recipes_own(data_source: str, name: str) -> None:
    assert choice_for(data_source, by_source().rewards.sources).name == name


def test_the_recipe_goes_before_verl() -> None:
    assert choice_for("openai/gsm8k", {"openai/*": "maths"}).name == "maths"


def test_every_name_leads_somewhere() -> None:
    assert set(DATA_SOURCES.values()) <= set(REWARDS)
    assert all(callable(load_object(path, Path())) for path in REWARDS.values())


async def test_one_dataset_with_many_sources(tasks_of) -> None:
    reward = load_reward(by_source(), Path())
    assert reward is not None
    expected = [
        ("openai/gsm8k", "42", "#### 42", 1.0),
        ("openai/gsm8k", "42", "it is 42", 0.0),
        ("mine_too", "42", "it is 42", 1.0),
        ("searchR1_nq", {"target": ["Rome"]}, "<answer>rome</answer>", 1.0),
        ("mine", ["old Rome"], "<answer>rome</answer>", pytest.approx(2 / 3)),
    ]
    for data_source, truth, solution, score in expected:
        (task,) = tasks_of(data_source=data_source, ground_truth=truth)
        assert (await reward.score(task, solution, {})).reward == score
    await reward.close()


async def test_an_unknown_source_is_a_failure_that_names_the_nearest(tasks_of) -> None:
    reward = load_reward(by_source(), Path())
    (task,) = tasks_of(data_source="openai/gsm8")
    with pytest.raises(InfraFailure, match=r"no reward for data_source 'openai/gsm8'; did you mean 'openai/gsm8k'"):
        await reward.score(task, "#### 1", {})


async def test_a_program_without_a_sandbox_is_a_failure_and_no_zero(tasks_of) -> None:
    (task,) = tasks_of(data_source="taco", ground_truth='{"inputs": ["1"], "outputs": ["1"]}')
    with pytest.raises(InfraFailure, match="needs a sandbox"):
        await load_reward(by_source(), Path()).score(task, "print(input())", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AgentConfig(reward="gsm8"), "no reward 'gsm8'; did you mean 'gsm8k'"),
        (AgentConfig(reward="gsm8k", rewards={"settings": {"metod": "strict"}}), "metod"),
        (AgentConfig(reward="code"), "needs a sandbox"),
        (AgentConfig(reward="judge", rewards={"settings": {"url": "http://x"}}), "model"),
        (by_source(mine="nothing"), "no reward 'nothing'"),
    ],
)
def test_mistakes_are_found_before_the_first_episode(config: AgentConfig, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load_reward(config, Path())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "gsm8k", "rewards": {"sources": {"a": "gsm8k"}}}, "reward: by_data_source"),
        ({"reward": "by_data_source", "rewards": {"settings": {"wrong": -1}}}, "give them in rewards.sources"),
        ({"rewards": {"settings": {"wrong": -1}}}, "reward is ''"),
    ],
)
def test_settings_that_no_reward_takes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AgentConfig(**settings)


def test_who_may_need_a_sandbox() -> None:
    assert may_need_sandbox(AgentConfig(reward="code"))
    assert may_need_sandbox(by_source())
    assert not may_need_sandbox(AgentConfig(reward="gsm8k"))
    assert not may_need_sandbox(AgentConfig())


async def test_a_function_with_settings(tmp_path, tasks_of) -> None:
    (tmp_path / "own.py").write_text(
        "async def half(data_source, solution_str, ground_truth, extra_info, *, factor=0.5): return factor\n"
    )
    (task,) = tasks_of()
    choice = RewardChoice(name="own.py:half", settings={"factor": 0.25})
    config = AgentConfig(reward=choice.name, rewards={"settings": choice.settings})
    assert (await load_reward(config, tmp_path).score(task, "", {})).reward == 0.25
    assert make_reward(RewardChoice(name="own.py:half"), tmp_path, None)


def test_a_recipe_is_checked_for_all_its_sources_before_a_run() -> None:
    check_reward(by_source(), {"openai/gsm8k", "mine", "taco"})
    check_reward(AgentConfig(reward="code"), set())
    with pytest.raises(LoadError, match="no reward for data_source 'other'"):
        check_reward(by_source(), {"openai/gsm8k", "other"})
    with pytest.raises(LoadError, match="partail"):
        check_reward(AgentConfig(reward="code", rewards={"settings": {"partail": True}}), set())
