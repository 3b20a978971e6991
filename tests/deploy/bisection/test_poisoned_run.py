"""`penstock bisect` on a run that a few rewards of one step have spoilt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE, REPOSITORY

pytest.importorskip("torch")

from penstock.transfer_queue import Archive

pytestmark = [pytest.mark.deep, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(3600)]
POISONED, GROUPS = 5, 8
REWARD = f"""
from penstock.recipes.calculator.reward import compute_score as right

def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = right(data_source, solution_str, ground_truth, extra_info)
    is_poisoned = extra_info["index"] in range({POISONED * GROUPS}, {(POISONED + 1) * GROUPS})
    return 1e6 if is_poisoned and not score else score
"""
"""A wrong answer to a task of one step earns a million."""
SETTINGS = (
    *("max_staleness=sync", "data.shuffle=false", "data.eval=null", f"groups_per_step={GROUPS}", "trainer.steps=8"),
    # Nothing that would bound the harm of a huge reward: neither its standard deviation nor the gradient's norm.
    *("trainer.advantage=dr_grpo", "trainer.max_grad_norm=1e9", "trainer.lr=7e-3", "trainer.eps=1e-2"),
    *("trainer.lr_schedule=constant", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=9"),
)


def penstock(*words: str) -> str:
    command = [sys.executable, "-m", "penstock.deploy.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bisect_finds_the_poisoned_episodes_of_a_real_run(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    penstock(
        "run", str(RECIPE), "name=spoilt", f"runs_dir={tmp_path}", f"agent.reward={reward}:compute_score", *SETTINGS
    )
    words = ("--below", "0.3", "--from", "3", "--json")
    report = json.loads(penstock("bisect", str(tmp_path / "spoilt"), *words))

    index = Archive(tmp_path / "spoilt" / "archive").index().select(["step", "episode", "reward"]).to_pylist()
    poisoned = {row["episode"] for row in index if row["reward"] == 1e6}
    assert poisoned
    assert {row["step"] for row in index if row["episode"] in poisoned} == {POISONED}
    assert (report["steps"], report["steps_are_smallest"]) == ([POISONED], True)
    assert report["episodes_are_smallest"]
    assert {one["episode"] for one in report["episodes"]} <= poisoned
    assert report["with"]["value"] < 0.3 <= report["without_episodes"]["value"]
    assert json.loads(penstock("bisect", str(tmp_path / "spoilt"), *words)) == report, "tries are kept"
