"""The recipe trains asynchronously, on the tiny model, for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, script

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]


def test_fully_async_for_a_few_steps(start_run, tmp_path: Path) -> None:
    script("retool/data.py").main(["arithmetic", "--out", str(tmp_path), "--train", "64", "--eval", "8"])
    data = (f"data.train={tmp_path / 'train.parquet'}", f"data.eval={tmp_path / 'eval.parquet'}")
    short = ("trainer.steps=3", "groups_per_step=4", "group_size=4", "max_staleness=fully_async", "agent.workers=1")
    summary = start_run("retool", *data, *short, recipe=RECIPES / "retool/cpu.yaml").finish(timeout_s=560)
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["reward_first"] > 0, "the tiny model solves some"
    assert_accounts_balance(summary)
