"""From a cold start that solves some tasks to a model that solves most of them, by the reward of whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import LivingRun
from tests.recipes.conftest import RECIPES, assert_learned, cold_start

from penstock.agent_loops import load_object

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
]
WINDOW = 3
"""Steps whose rewards count together."""


@pytest.mark.parametrize(
    ("recipe", "data_of", "seed", "target", "first_most", "last_least", "growth"),
    [
        pytest.param("compaction/cpu.yaml", (), 0, 0.85, 0.5, 0.8, 1.5, id="summaries keep what the answer needs"),
        pytest.param("sokoban/learn.yaml", (), 0, 0.88, 0.45, 0.75, 2.0, id="rooms are solved, by GiGPO"),
        # How often a cold start stops too early differs by seed: with 1 it begins in the middle of what was seen.
        pytest.param(
            *("retool/learn.yaml", ("steps",), 1, 0.9, 0.45, 0.75, 2.0),
            id="tools are called until nothing follows",
            marks=pytest.mark.bwrap,
        ),
        pytest.param(
            *("tree/cpu.yaml", ("steps",), 1, 0.9, 0.6, 0.8, 1.5),
            id="the same by branches of episodes, with tree_rl",
            marks=pytest.mark.bwrap,
        ),
    ],
)
def test_a_small_model_learns_what_its_cold_start_does_not_do(
    start_run: Callable[..., LivingRun],
    tmp_path: Path,
    recipe: str,
    data_of: tuple[str, ...],
    seed: int,
    target: float,
    first_most: float,
    last_least: float,
    growth: float,
) -> None:
    if recipe.startswith(("retool", "tree")):
        pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")
    path = RECIPES / recipe
    data = RECIPES / "retool/data.py" if recipe.startswith("tree") else path.parent / "data.py"
    load_object(f"{data}:main", Path.cwd())([*data_of, "--out", str(tmp_path)])
    model = cold_start(path, tmp_path, f"seed={seed}")

    settings = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null", f"model={model}", f"seed={seed}")
    goal = ("trainer.stop.metric=reward", f"trainer.stop.target={target}", f"trainer.stop.window={WINDOW}")
    run = start_run("learn", *settings, *goal, recipe=path)
    assert_learned(run, window=WINDOW, first_most=first_most, last_least=last_least, growth=growth)


def test_search_r1_learns_a_second_search(
    start_run: Callable[..., LivingRun], two_hops: Path, searching: Callable[..., str]
) -> None:
    """Some of the questions are never answered by this small model: the reward of one step is between 0.3 and 0.8."""
    recipe, window = RECIPES / "search_r1/learn.yaml", 8
    model = cold_start(recipe, two_hops, base=two_hops / "base")
    data = (f"data.train={two_hops / 'train.parquet'}", "data.eval=null", f"model={model}", searching(topk=1))
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.5", f"trainer.stop.window={window}")
    run = start_run("two-hops", *data, "trainer.steps=96", *goal, recipe=recipe)
    assert_learned(run, window=window, first_window=5, first_most=0.33, last_least=0.5, growth=1.5)
