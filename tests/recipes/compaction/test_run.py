"""From half-forgetful summaries to whole ones, by the reward of whole episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, cold_start, script

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
]
WINDOW = 3


def test_summaries_learn_to_keep_what_the_answer_needs(start_run, tmp_path: Path) -> None:
    script("compaction/data.py").main(["--out", str(tmp_path)])
    recipe = RECIPES / "compaction/cpu.yaml"
    model = cold_start(recipe, tmp_path)

    data = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null", f"model={model}")
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.85", f"trainer.stop.window={WINDOW}")
    run = start_run("compaction", *data, *goal, recipe=recipe)
    summary = run.finish(timeout_s=900)
    rewards = [json.loads(line)["reward"] for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    assert first <= 0.5
    assert last >= 0.8
    assert_accounts_balance(summary)
