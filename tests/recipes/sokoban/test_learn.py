"""From a cold start that solves three rooms in ten to a model that solves most of them, by GiGPO."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import LivingRun, assert_accounts_balance
from tests.recipes.conftest import RECIPES, cold_start

from penstock.agent_loops import load_object

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
]
WINDOW = 3


def test_rooms_are_learned_from_rewards(start_run: Callable[..., LivingRun], tmp_path: Path) -> None:
    load_object(f"{RECIPES / 'sokoban/data.py'}:main", Path.cwd())(["--out", str(tmp_path)])
    recipe = RECIPES / "sokoban/learn.yaml"
    model = cold_start(recipe, tmp_path)

    data = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null", f"model={model}")
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.88", f"trainer.stop.window={WINDOW}")
    run = start_run("sokoban", *data, *goal, recipe=recipe)
    summary = run.finish(timeout_s=900)
    rewards = [json.loads(line)["reward"] for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    assert first <= 0.45
    assert last >= max(0.75, 2 * first)
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
