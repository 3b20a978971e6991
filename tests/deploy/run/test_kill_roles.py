"""Invariant 2: any role may be killed with -9 at any time; the run reaches its goal and the accounts balance."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import SMALL, assert_accounts_balance, assert_nothing_left, held_by

from penstock.transfer_queue import Archive

pytestmark = [
    *(pytest.mark.crash, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    pytest.mark.timeout(2700),
]
VICTIMS = [
    ("penstock.deploy.cli agent", "agent-0"),
    ("penstock.deploy.cli rollout", "rollout-0"),
    ("engines.hf.server",),
    ("train-rank",),
    ("redis-server",),
]
RUNS = [
    pytest.param(len(VICTIMS) + 7, 1, SMALL, False, id="small"),
    pytest.param(24, 3, (), True, id="until-it-has-learned", marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("steps", "every", "settings", "learns"), RUNS)
def test_kill_each_role_once(start_run, steps: int, every: int, settings: tuple[str, ...], learns: bool) -> None:
    """Worker, sidecar, engine, trainer and redis die `every` steps apart; the engine comes back inside its sidecar."""
    run = start_run("roles", f"trainer.steps={steps}", *settings)
    seen = []
    for number, victim in enumerate(VICTIMS):
        run.wait_for(lambda goal=1 + every * number, words=victim: run.steps() >= goal and bool(run.pids(*words)))
        seen += run.pids()
        run.kill_one(*victim)
    summary = run.finish()
    assert summary["steps"] == steps
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
    assert [summary["restarts"][role] for role in ("agent-0", "rollout-0", "trainer")] == [1, 1, 1]
    assert_nothing_left(run, seen)
    assert replayed(run.root) == {"steps_equal": steps, "steps_different": 0, "weights_equal": True}
    if learns:
        assert summary["reward_last"] >= 0.8
        assert summary["eval_reward"] >= 0.9


def replayed(root: Path) -> dict[str, Any]:
    """The verdict of `penstock replay` over the whole run."""
    command = [sys.executable, "-m", "penstock.deploy.cli", "replay", str(root), "--from", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2500:]
    (result,) = root.glob("replays/0-*/replay.json")
    return {name: value for name, value in json.loads(result.read_text()).items() if "equal" in name or "diff" in name}


@pytest.mark.deep
def test_kill_two_ranks_replay_from_the_archive(start_run, tmp_path: Path) -> None:
    """No checkpoint is there yet: every step so far is read again, from the log that both ranks wrote."""
    settings = ("trainer.steps=8", "trainer.checkpoint_every=100", "trainer.ranks=2", "data.eval_limit=16")
    hold = tmp_path / "hold"
    run = start_run("spilled", *settings, "groups_per_step=4", "group_size=4", *held_by(hold))
    log = Archive(run.root / "archive")
    run.wait_for(lambda: len(log.steps()) >= 4)
    hold.touch()
    # No rank is more than a step ahead of the other.
    assert [sum(file.step == step for file in log.files()) for step in (0, 1)] == [2, 2]
    run.kill_one("train-rank")
    hold.unlink()
    summary = run.finish()
    assert (summary["steps"], summary["restarts"]["trainer"]) == (8, 1)
    assert_accounts_balance(summary)
    assert log.verify() == []
    assert replayed(run.root) == {"steps_equal": 8, "steps_different": 0, "weights_equal": True}
    assert sorted(set(log.index()["step"].to_pylist())) == list(range(8))
