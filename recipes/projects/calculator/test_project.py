"""The project's parts, without a model: `pytest` takes seconds."""

import asyncio
from pathlib import Path

import policies
import pytest
from reward import compute_score
from tool import calculate

from penstock.deploy import load_config
from penstock.testing import check_env
from penstock.transfer_queue import Task

HERE = Path(__file__).parent


def test_the_tool_computes() -> None:
    assert calculate("print(round(4821*307,4))") == "1480047"


def test_the_tool_runs_no_code() -> None:
    with pytest.raises(ValueError, match="arithmetic"):
        calculate("__import__('os').getcwd()")


@pytest.mark.parametrize(("answer", "score"), [("1480047", 1.0), ("It is 1,480,047.", 1.0), ("1480000", 0.0)])
def test_the_reward_reads_the_last_number(answer: str, score: float) -> None:
    assert compute_score("calculator", answer, "1480047") == score


@pytest.mark.skipif(not (HERE / "model").is_dir(), reason="the README's first command makes the model")
@pytest.mark.parametrize(("policy", "reward"), [(policies.oracle, 1.0), (policies.null, 0.0)])
def test_only_an_agent_that_calls_the_tool_earns_the_reward(policy, reward: float) -> None:
    config = load_config(HERE / "recipe.yaml")
    prompt = [{"role": "user", "content": "What is 4821*307?"}]
    task = Task("t0", "test", prompt, "calculator", "1480047", extra_info={"expression": "4821*307"})
    check = asyncio.run(
        check_env([task], policy, model=config.model, config=config.agent, tools=config.tools, recipe_dir=HERE)
    )
    assert (check.rewards, check.failures) == ([reward], [])


def test_the_recipe_is_sound() -> None:
    config = load_config(HERE / "recipe.yaml")
    assert Path(config.agent.reward.partition(":")[0]).parent == HERE
