"""The project's parts, without a model: `pytest` takes seconds."""

from pathlib import Path

import pytest
from reward import compute_score
from tool import calculate

from penstock.deploy import load_config

HERE = Path(__file__).parent


def test_the_tool_computes() -> None:
    assert calculate("print(round(4821*307,4))") == "1480047"


def test_the_tool_runs_no_code() -> None:
    with pytest.raises(ValueError, match="arithmetic"):
        calculate("__import__('os').getcwd()")


@pytest.mark.parametrize(("answer", "score"), [("1480047", 1.0), ("It is 1,480,047.", 1.0), ("1480000", 0.0)])
def test_the_reward_reads_the_last_number(answer: str, score: float) -> None:
    assert compute_score("calculator", answer, "1480047") == score


def test_the_recipe_is_sound() -> None:
    config = load_config(HERE / "recipe.yaml")
    assert Path(config.agent.reward.partition(":")[0]).parent == HERE
