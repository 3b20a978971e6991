"""The project's parts, without a model: `pytest` takes seconds."""

from pathlib import Path

import data
import pytest
from reward import said_at_last

from penstock.deploy import load_config

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("turn", "answer"),
    [("so \\boxed{42}", "\\boxed{42}"), ("it is 42", None), ('<tool_call>{"name": "python"}</tool_call>', None)],
)
def test_only_a_boxed_answer_of_the_last_turn_counts(turn: str, answer: str | None) -> None:
    assert said_at_last(turn, boxed=True) == answer


def test_data_is_made(tmp_path: Path) -> None:
    data.main(["arithmetic", "--out", str(tmp_path), "--train", "8", "--eval", "4"])
    assert {path.name for path in tmp_path.iterdir()} == {"train.parquet", "eval.parquet"}


@pytest.mark.parametrize("name", ["recipe.yaml", "learn.yaml"])
def test_the_recipe_is_sound(name: str) -> None:
    config = load_config(HERE / name)
    assert Path(config.agent.reward.partition(":")[0]).parent == HERE
