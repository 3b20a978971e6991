"""A run's folder that was moved and renamed, without the Python recipe that began it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes/own_environment/doors.py"
MODEL = RECIPE.parents[1] / "calculator/model"
SMALL = ("groups_per_step=2", "group_size=4", "data.eval=", "trainer.checkpoint_every=2", "agent.workers=1")
pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch, pytest.mark.timeout(1500)]


def penstock(folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "penstock.deploy.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == code, ended.stderr
    return ended.stderr


def test_a_moved_run_resumes_is_evaluated_and_exported_where_it_is(tmp_path: Path) -> None:
    recipe = tmp_path / "doors.py"
    recipe.write_text(RECIPE.read_text())
    penstock(tmp_path, "run", "doors.py", *SMALL, "trainer.steps=2")
    moved = tmp_path / "archive" / "old-doors"
    moved.parent.mkdir()
    (tmp_path / "runs" / "doors").rename(moved)
    recipe.unlink()
    other = shutil.copytree(MODEL, tmp_path / "other")
    refused = penstock(tmp_path, "run", str(moved), f"model={other}", "--resume", "trainer.steps=3", code=2)
    assert f"add model={MODEL}, or continue the run by its folder: penstock run {moved} --resume" in refused
    penstock(tmp_path, "run", str(moved), "--resume", "trainer.steps=3")
    assert [json.loads(line)["step"] for line in (moved / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    penstock(tmp_path, "eval", str(moved), "--split", "train", "--rows", "2", "--n", "1")
    assert (moved.parent / "old-doors-eval" / "settings.json").exists()
    penstock(tmp_path, "train", "export", str(moved), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "config.json").exists()
    assert list((tmp_path / "runs").iterdir()) == []
