"""Invariant 2: any role may be killed with -9 at any time; the run reaches its goal and the accounts balance."""

import pytest
from tests.deploy.conftest import assert_accounts_balance, assert_nothing_left

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.bwrap,
    pytest.mark.torch,
    pytest.mark.timeout(900),
]


def test_each_role_killed_once(start_run) -> None:
    run = start_run(
        "killed", "trainer.steps=16", "groups_per_step=4", "data.eval_limit=16", "trainer.checkpoint_every=4"
    )
    run.wait_for(lambda: run.steps() >= 2)
    victims = [
        ("penstock.deploy.cli agent", "agent-0"),
        ("penstock.deploy.cli rollout", "rollout-0"),
        ("hf_server",),
        ("train-rank",),
        ("redis-server",),
    ]
    seen = []
    for victim in victims:
        before = run.steps()
        seen += run.pids()
        run.kill_one(*victim)
        run.wait_for(lambda goal=before + 2: run.steps() >= goal)
    summary = run.finish()
    assert summary["steps"] == 16
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
    assert summary["restarts"]["agent-0"] == 1
    assert summary["restarts"]["trainer"] == 1
    assert_nothing_left(seen, "killed")
