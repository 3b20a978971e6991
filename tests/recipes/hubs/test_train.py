"""Environments of hubs train the small model for ten steps: exact tokens, accounts at zero."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.agent_loops.environments.conftest import HUBS, hub
from tests.deploy.conftest import LivingRun, assert_accounts_balance, assert_nothing_left
from tests.recipes.conftest import RECIPES

pytestmark = [
    *(pytest.mark.hubs, pytest.mark.deep, pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
    pytest.mark.timeout(900),
]
STEPS = 10
SHORT = (
    *(f"trainer.steps={STEPS}", "trainer.checkpoint_every=5", "data.eval=null"),
    *("groups_per_step=1", "group_size=4", "agent.workers=1"),
)


def check(run: LivingRun, episodes: int, steps: int = STEPS) -> dict[str, Any]:
    summary = run.finish(timeout_s=800)
    assert summary["steps"] == steps
    assert summary["episodes_trained"] == episodes
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
    return summary


@hub("text", "gymnasium")
def test_an_environment_of_gymnasium_trains_with_gigpo(start_run: Callable[..., LivingRun]) -> None:
    run = start_run("gymnasium", *SHORT, "trainer.advantage=gigpo", recipe=RECIPES / "hubs/gymnasium.yaml")
    check(run, STEPS * 4)


@pytest.mark.crash
@hub("text", "gymnasium")
def test_episodes_of_a_killed_worker_are_played_again(start_run: Callable[..., LivingRun]) -> None:
    steps = 2 * STEPS  # the worker is killed after two or three of them, be the run quick and this process slow
    run = start_run("killed-player", *SHORT, f"trainer.steps={steps}", recipe=RECIPES / "hubs/gymnasium.yaml")
    worker = ("penstock.deploy.cli agent", "agent-0")
    run.wait_for(lambda: run.steps() >= 2 and bool(run.pids(*worker)) and bool(run.pids("environments/host.py")))
    seen = run.pids()
    run.kill_one(*worker)
    summary = check(run, steps * 4, steps)
    assert summary["restarts"]["agent-0"] == 1
    assert_nothing_left(run, seen)


@pytest.fixture
def digits() -> Iterator[str]:
    """The recipe's own server."""
    from tests.agent_loops.environments.test_hubs import wait_for_port
    from tests.ports import free_port

    port = free_port()
    argv = [sys.executable, "-P", str(RECIPES / "hubs/openenv_server.py"), "--port", str(port)]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(HUBS / "openenv")})
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@hub("openenv", "openenv")
def test_an_environment_of_openenv_trains(start_run: Callable[..., LivingRun], digits: str) -> None:
    run = start_run("openenv", *SHORT, f"agent.settings.url={digits}", recipe=RECIPES / "hubs/openenv.yaml")
    check(run, STEPS * 4)


@pytest.mark.bwrap
@hub("verifiers", "verifiers")
def test_an_environment_of_verifiers_trains(start_run: Callable[..., LivingRun]) -> None:
    run = start_run("verifiers", *SHORT, "group_size=2", recipe=RECIPES / "hubs/verifiers.yaml")
    check(run, STEPS * 2)
