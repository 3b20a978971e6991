"""From a cold start that solves some tasks to a model that solves most of them, by the reward of whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import LivingRun, assert_accounts_balance
from tests.recipes.conftest import RECIPES, cold_start, rewards_of

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
    if recipe.startswith("retool"):
        pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")
    path = RECIPES / recipe
    load_object(f"{path.parent / 'data.py'}:main", Path.cwd())([*data_of, "--out", str(tmp_path)])
    model = cold_start(path, tmp_path, f"seed={seed}")

    data = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null", f"model={model}", f"seed={seed}")
    goal = ("trainer.stop.metric=reward", f"trainer.stop.target={target}", f"trainer.stop.window={WINDOW}")
    run = start_run("learn", *data, *goal, recipe=path)
    summary = run.finish(timeout_s=900)
    rewards = rewards_of(run)
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    assert first <= first_most, rewards
    assert last >= max(last_least, growth * first), rewards
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
