"""The project's parts, without a model: `pytest test_project.py` takes seconds."""

from pathlib import Path

import learn_data
import policies
import pytest

from penstock.deploy import load_config

HERE = Path(__file__).parent


def test_the_policies_that_prove_the_tasks_end_with_submit() -> None:
    patch = "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-1\n+2\n"
    for answers in (policies.repair({"patch": patch}), policies.NOTHING):
        assert "submit" in answers[-1]


def test_tasks_of_learn_are_made(tmp_path: Path) -> None:
    learn_data.main(["--out", str(tmp_path), "--conversations", "8"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"train.parquet", "eval.parquet", "conversations.jsonl", "repositories"}


@pytest.mark.parametrize("name", ["recipe.yaml", "learn.yaml"])
def test_the_recipe_is_sound(name: str) -> None:
    config = load_config(HERE / name)
    assert Path(config.agent.loop.partition(":")[0]).parent == HERE
    assert [tool.name for tool in config.tools] == ["swe"]
