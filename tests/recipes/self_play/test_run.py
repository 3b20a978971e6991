"""PRIME, SPPO and SPIN train the calculator, for a few steps."""

from __future__ import annotations

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]


@pytest.mark.parametrize("name", ["prime", "sppo", "spin"])
def test_fully_async_for_a_few_steps(name: str, start_run) -> None:
    short = ("trainer.steps=3", "groups_per_step=8", "group_size=4", "agent.workers=1", "data.eval=null")
    summary = start_run(name, *short, recipe=RECIPES / f"self_play/{name}.yaml").finish(timeout_s=560)
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["reward_first"] > 0, "the base model solves some"
    assert_accounts_balance(summary)
