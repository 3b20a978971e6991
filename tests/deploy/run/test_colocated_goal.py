"""The quickstart's recipe with one key changed reaches its reward, its engine and trainer in turns on one device."""

from __future__ import annotations

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.deploy.run.test_colocated import BUDGET, SHARED, assert_the_budget_holds

pytestmark = [
    *(pytest.mark.deep, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    pytest.mark.timeout(1500),
]


@pytest.mark.parametrize("level", [1, 2])
def test_the_quickstart_learns_in_turns(start_run, level: int) -> None:
    """The recipe with one key changed, and a budget; under level 2, which only loads more, in few steps."""
    steps = 26 if level == 1 else 3
    words = ("trainer.warmup_steps=2", f"trainer.steps={steps}", f"placement.sleep_level={level}")
    run = start_run(f"shared-{level}", *SHARED, *words)
    summary = run.finish()
    assert summary["steps"] == steps
    assert_accounts_balance(summary)
    assert (summary["staleness_max"] <= 2, sum(summary["restarts"].values())) == (True, 0)
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_the_budget_holds(run)
    assert summary["turns"]["trainer"] >= steps
    assert summary["device_bytes_claimed_max"] <= BUDGET
    if level == 1:
        assert summary["eval_reward"] >= 0.9
