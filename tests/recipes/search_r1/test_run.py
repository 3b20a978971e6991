"""The recipe trains asynchronously, on its small model, for a few steps, with a real search server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]


def test_fully_async_for_a_few_steps(start_run, search_r1: Path, searching: Callable[[], str]) -> None:
    data = (f"data.train={search_r1 / 'train.parquet'}", f"data.eval={search_r1 / 'eval.parquet'}", "data.eval_limit=4")
    short = ("trainer.steps=3", "groups_per_step=4", "group_size=4", "max_staleness=fully_async", "agent.workers=1")
    model = f"model={search_r1 / 'base'}"
    summary = start_run("search-r1", model, *data, *short, searching(), recipe=RECIPES / "search_r1/cpu.yaml").finish(
        timeout_s=560
    )
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
