"""The project's parts, without a model: `pytest test_project.py` takes seconds."""

from pathlib import Path

import policies

from penstock.deploy import load_config

HERE = Path(__file__).parent


def test_the_policies_that_prove_the_tasks_are_there() -> None:
    assert callable(policies.oracle({"patch": "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-1\n+2\n"}))
    assert callable(policies.null({}))


def test_the_recipe_is_sound() -> None:
    config = load_config(HERE / "recipe.yaml")
    assert Path(config.agent.loop.partition(":")[0]).parent == HERE
    assert [tool.name for tool in config.tools] == ["swe"]
