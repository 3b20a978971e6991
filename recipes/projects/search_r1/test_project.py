"""The project's parts, without a model: `pytest` takes seconds."""

from pathlib import Path

import data
import pytest
from reward import compute_score

from penstock.deploy import load_config

HERE = Path(__file__).parent


@pytest.mark.parametrize(("turn", "score"), [("<answer>the Arno</answer>", 1.0), ("Arno", 0.0)])
def test_the_reward_reads_the_answer_alone(turn: str, score: float) -> None:
    assert compute_score("search_r1", turn, {"target": ["Arno"]})["score"] == score


def test_data_is_made(tmp_path: Path) -> None:
    data.main(["small", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"train.parquet", "eval.parquet"}


def test_the_recipe_is_sound() -> None:
    config = load_config(HERE / "recipe.yaml")
    assert Path(config.agent.reward.partition(":")[0]).parent == HERE
