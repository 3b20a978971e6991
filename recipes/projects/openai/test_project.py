"""The project's parts, without a model: `pytest` takes seconds."""

from pathlib import Path

import agent
import pytest
from reward import compute_score

from penstock.deploy import load_config

HERE = Path(__file__).parent


@pytest.mark.parametrize(("answer", "score"), [("1480047", 1.0), ("It is 1,480,047.", 1.0), ("1480000", 0.0)])
def test_the_reward_reads_the_last_number(answer: str, score: float) -> None:
    assert compute_score("calculator", answer, "1480047") == score


def test_episodes_are_left_to_the_agent() -> None:
    config = load_config(HERE / "recipe.yaml")
    assert config.agent.workers == 0
    assert config.agent.max_turns >= agent.MAX_TURNS
    assert Path(config.agent.reward.partition(":")[0]).parent == HERE
