"""From one search to two, by the reward of the answer alone, with a real search server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, cold_start, rewards_of

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]
RECIPE = RECIPES / "search_r1/learn.yaml"
WINDOW = 8
"""Steps that count together: the reward of one is that of eight questions, of which some are never answered by this
small model: it goes between 0.3 and 0.8 while the mean stays near 0.6."""


def test_a_second_search_is_learned(start_run, two_hops: Path, searching: Callable[..., str]) -> None:
    model = cold_start(RECIPE, two_hops, base=two_hops / "base")

    data = (f"data.train={two_hops / 'train.parquet'}", "data.eval=null", f"model={model}", searching(topk=1))
    goal = (
        "trainer.steps=96",
        "trainer.stop.metric=reward",
        "trainer.stop.target=0.5",
        f"trainer.stop.window={WINDOW}",
    )
    run = start_run("two-hops", *data, *goal, recipe=RECIPE)
    summary = run.finish(timeout_s=900)
    rewards = rewards_of(run)
    first, last = sum(rewards[:5]) / 5, sum(rewards[-WINDOW:]) / WINDOW
    assert first <= 0.33
    assert last >= max(0.5, 1.5 * first)
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
